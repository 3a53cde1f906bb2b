"""Scheduling policies: the order of requests, and which may preempt which. Built in notebook 04."""

from __future__ import annotations

from abc import ABC, abstractmethod

from labcore.request import Request


class Policy(ABC):
    """Who is more entitled to slots, budget and blocks, and who may take them from whom."""

    @abstractmethod
    def entitlement(self, request: Request) -> tuple:
        """Sort key, smaller first. Fixed from the request's arrival on, so that no queue is ever sorted again."""

    @abstractmethod
    def outranks(self, waiting: Request, running: Request) -> bool:
        """Whether a waiting request may push a running one out. Never true between equals, in either direction."""


class FirstComeFirstServed(Policy):
    """In order of arrival. Nobody is pushed out for a newcomer."""

    def entitlement(self, request: Request) -> tuple:
        return (request.arrival, request.birth)

    def outranks(self, waiting: Request, running: Request) -> bool:
        return False


class PriorityWithAging(Policy):
    """A smaller priority number first, and `aging` steps of waiting are worth one number.

    All requests age at the same pace, so their order never changes: what counts is `priority * aging + arrival_step`.
    Nobody starves: a request of priority p can be overtaken by one of priority q only if that one arrives less than
    (p - q) * aging steps later.
    """

    def __init__(self, aging: int) -> None:
        self.aging = aging

    def entitlement(self, request: Request) -> tuple:
        return (request.priority * self.aging + request.arrival_step, request.arrival, request.birth)

    def outranks(self, waiting: Request, running: Request) -> bool:
        more_urgent = waiting.priority < running.priority
        return more_urgent and self.entitlement(waiting) < self.entitlement(running)

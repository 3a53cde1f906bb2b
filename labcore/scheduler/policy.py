"""Scheduling policies: the order of requests, and which may preempt which. Built in notebook 04."""

from __future__ import annotations

from abc import ABC, abstractmethod

from labcore.request import Request


class Policy(ABC):
    """The order in which requests get slots, budget and blocks, and which may take them from which."""

    @abstractmethod
    def sort_key(self, request: Request) -> tuple:
        """Sort key, smaller first. Fixed from the request's arrival on, so that no queue is ever sorted again."""

    @abstractmethod
    def can_preempt(self, waiting: Request, running: Request) -> bool:
        """Whether a waiting request may preempt a running one. Never true between equals, in either direction."""


class FirstComeFirstServed(Policy):
    """In order of arrival. A newcomer preempts no other request."""

    def sort_key(self, request: Request) -> tuple:
        return (request.arrival, request.beam_id)

    def can_preempt(self, waiting: Request, running: Request) -> bool:
        return False


class PriorityWithAging(Policy):
    """A smaller priority number first, and `aging` steps of waiting are worth one number.

    All requests age at the same pace, so their order never changes: the key is `priority * aging + arrival_step`. There is
    no starvation: a request of priority p is overtaken by one of priority q only if that one arrives less than
    (p - q) * aging steps later.
    """

    def __init__(self, aging: int) -> None:
        self.aging = aging

    def sort_key(self, request: Request) -> tuple:
        return (request.priority * self.aging + request.arrival_step, request.arrival, request.beam_id)

    def can_preempt(self, waiting: Request, running: Request) -> bool:
        more_urgent = waiting.priority < running.priority
        return more_urgent and self.sort_key(waiting) < self.sort_key(running)

"""Invariants: refcounts, free list, queues and tables, recomputed from scratch and compared. And: every step makes progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from labcore.kvcache.blocks import BlockPool, BlockTable, OutOfBlocks
from labcore.request import Request, RequestStatus
from labcore.scheduler.scheduler import Scheduler


class IntegrityError(AssertionError):
    """Two parts of the engine disagree about blocks or queues. A defect in labcore, or in a part plugged into it."""


class StandstillError(RuntimeError):
    """Steps in a row planned nothing, though requests are unfinished. A defect in a scheduler that is plugged in."""


MAX_EMPTY_STEPS = 3
"""Empty steps in a row that are an error. labcore's own scheduler plans none."""


def check_progress(scheduler: Scheduler, requests: Iterable[Request], num_empty_steps: int) -> None:
    """A step has planned nothing. Raises StandstillError, which names the requests, after MAX_EMPTY_STEPS in a row.

    requests: every unfinished request that the engine knows. Raises OutOfBlocks at once if blocks without a request are
    the reason.
    """
    unfinished = list(requests)
    check_foreign_blocks(scheduler.kv.pool, unfinished)
    if num_empty_steps < MAX_EMPTY_STEPS:
        return
    queued = {id(request) for request in [*scheduler.running, *scheduler.waiting_requests()]}
    lost = [request for request in unfinished if id(request) not in queued]
    if lost:
        why = f"the scheduler has lost {names_of(lost)}: add() must queue a request, and so must a preemption"
    else:
        why = f"{names_of(unfinished)} could go on: schedule() must plan tokens for at least one unfinished request"
    raise StandstillError(f"{num_empty_steps} steps in a row planned nothing, and {why}.")


def check_foreign_blocks(pool: BlockPool, requests: Iterable[Request]) -> None:
    """Raises OutOfBlocks if blocks are in use that no request owns."""
    owned = {block for request in requests for block in request.table.blocks}
    foreign = pool.num_blocks - pool.num_free - len(owned)
    if foreign > 0:
        raise OutOfBlocks(
            f"no request can be scheduled: {foreign} of the pool's {pool.num_blocks} blocks belong to no request, "
            f"and {pool.num_free} are free — give the others back with pool.free(), or abort() a request."
        )


def names_of(requests: list[Request], most: int = 3) -> str:
    """`'a', 'b' and 5 more`."""
    named, more = requests[:most], len(requests) - most
    return ", ".join(repr(request.request_id) for request in named) + (f" and {more} more" if more > 0 else "")


def check_integrity(scheduler: Scheduler, requests: Iterable[Request], tables: Iterable[BlockTable] = ()) -> None:
    """Recompute refcounts, the free list and every request's state, and compare. Raises IntegrityError on a mismatch.

    requests: every unfinished request that the engine knows
    tables: those of no request, whose blocks the pool failed to take back
    """
    requests = list(requests)
    check_states(scheduler, requests)
    check_tables(requests)
    check_pool(scheduler.kv.pool, [*(request.table for request in requests), *tables])


def check_states(scheduler: Scheduler, requests: list[Request]) -> None:
    """Each unfinished request is in exactly the queue that its status names, and each running one has tokens to compute."""
    waiting = scheduler.waiting_requests()
    places = Counter(id(request) for request in [*scheduler.running, *waiting])
    for request in requests:
        running = request.status is RequestStatus.RUNNING
        queue = scheduler.running if running else waiting
        expect(places.pop(id(request), 0) == 1, f"request {request.request_id!r} is not in exactly one queue")
        expect(any(r is request for r in queue), f"request {request.request_id!r} is {request.status.value}, not queued so")
        waits_for_beams = request.params.is_search
        progresses = not running or waits_for_beams or request.num_uncomputed_tokens > 0
        expect(progresses, f"request {request.request_id!r} runs and has nothing to compute")
    expect(not places, f"{len(places)} requests are queued that the engine doesn't know")
    expect(
        len(scheduler.running) <= scheduler.max_num_seqs,
        f"{len(scheduler.running)} requests run, {scheduler.max_num_seqs} may",
    )
    order = [scheduler.policy.sort_key(r) for r in scheduler.running]
    expect(order == sorted(order), "running requests are out of order")


def check_tables(requests: list[Request]) -> None:
    """A running request's table holds exactly its computed tokens; any other request holds no block."""
    for request in requests:
        table = request.table
        held = request.num_computed_tokens if request.status is RequestStatus.RUNNING else 0
        name = f"request {request.request_id!r} ({request.status.value})"
        expect(table.num_tokens == held, f"{name}: table holds {table.num_tokens} tokens, {held} are computed")
        wanted = -(-held // table.pool.block_size)
        expect(len(table.blocks) == wanted, f"{name}: {len(table.blocks)} blocks for {held} tokens, expected {wanted}")
        expect(request.num_computed_tokens <= request.num_tokens, f"{name}: more tokens computed than there are")


def check_pool(pool: BlockPool, tables: Iterable[BlockTable]) -> None:
    """A block's refcount is the number of tables that list it, and a block is free exactly if that is none."""
    owners = Counter(block for table in tables for block in table.blocks)
    for block in range(pool.num_blocks):
        counted, refcount = owners.pop(block, 0), pool.refcount(block)
        expect(counted == refcount, f"block {block}: {counted} tables list it, its refcount is {refcount}")
    expect(not owners, f"tables list blocks that the pool doesn't have: {sorted(owners)}")
    free = list(pool.free_blocks())
    expect(len(free) == len(set(free)) == pool.num_free, f"num_free is {pool.num_free}, the free list has {len(free)}")
    expect(all(pool.refcount(block) == 0 for block in free), "the free list names a block that has an owner")
    expect(
        len(free) == sum(pool.refcount(block) == 0 for block in range(pool.num_blocks)),
        "a block without an owner is missing from the free list",
    )


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise IntegrityError(otherwise)

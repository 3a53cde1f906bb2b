"""The block pool and the block table: who owns what, and that nothing changes when something is refused."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from labcore.kvcache.blocks import BlockError, BlockPool, BlockTable, OutOfBlocks


def state(pool):
    """Everything that a refused call must leave as it was."""
    return list(pool.free_blocks()), pool.num_free, [pool.refcount(b) for b in range(pool.num_blocks)]


def test_allocate_takes_blocks_in_the_given_order_and_free_puts_them_at_the_tail():
    pool = BlockPool(4, 16, free_order=[2, 0, 3, 1])
    assert pool.allocate(2) == [2, 0]
    pool.free([0, 2])
    assert list(pool.free_blocks()) == [3, 1, 0, 2]
    assert pool.allocate(4) == [3, 1, 0, 2] and list(pool.free_blocks()) == []
    pool.free([1])
    assert pool.allocate(1) == [1]


@pytest.mark.parametrize("num_blocks, block_size, field", [
    (0, 16, "num_blocks"), (-1, 16, "num_blocks"), (2.0, 16, "num_blocks"), (True, 16, "num_blocks"),
    (4, 0, "block_size"), (4, -16, "block_size"), (4, None, "block_size"),
])
def test_pool_without_blocks_or_slots_is_rejected_by_field(num_blocks, block_size, field):
    with pytest.raises(ValueError, match=f"{field} is .*at least 1"):
        BlockPool(num_blocks, block_size)


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 2, 2], [0, 1, 2, 4], [0, 1, 2, 3, 3]])
def test_pool_free_order_that_is_no_permutation_is_rejected(order):
    with pytest.raises(ValueError, match="free_order"):
        BlockPool(4, 16, free_order=order)


def test_allocate_is_all_or_nothing():
    pool = BlockPool(4, 16)
    pool.allocate(2)
    before = state(pool)
    with pytest.raises(OutOfBlocks, match="3 blocks wanted, 2 of 4 are free"):
        pool.allocate(3)
    with pytest.raises(ValueError, match="n is -1"):
        pool.allocate(-1)
    assert state(pool) == before and pool.allocate(0) == []


@pytest.mark.parametrize("blocks", [[0, 0], [0, 3], [0, 4], [0, -1], [1, 0, 1]])
def test_free_of_a_bad_block_raises_and_frees_nothing(blocks):
    """A second release, also within one call, a free block, an id past the end, an id that would count from the end."""
    pool = BlockPool(4, 16)
    pool.allocate(2)
    before = state(pool)
    with pytest.raises(BlockError, match="can't be freed"):
        pool.free(blocks)
    assert state(pool) == before


@pytest.mark.parametrize("blocks", [[0, 3], [0, 4], [-1]])
def test_share_of_a_bad_block_raises_and_shares_nothing(blocks):
    pool = BlockPool(4, 16)
    pool.allocate(2)
    before = state(pool)
    with pytest.raises(BlockError, match="can't be shared"):
        pool.share(blocks)
    assert state(pool) == before


def test_refcount_of_a_shared_block_is_0_only_when_its_last_owner_frees_it():
    pool = BlockPool(2, 16)
    (block,) = pool.allocate(1)
    pool.share([block])
    assert pool.refcount(block) == 2 and not pool.is_writable(block)
    pool.free([block])
    assert pool.is_writable(block) and pool.num_free == 1
    pool.free([block])
    assert pool.refcount(block) == 0 and not pool.is_writable(block) and pool.num_free == 2


def test_incref_takes_a_free_block_out_of_the_middle_of_the_queue():
    pool = BlockPool(5, 16)
    pool.incref([2, 0, 4])
    assert list(pool.free_blocks()) == [1, 3] and pool.num_free == 2
    pool.incref([2])
    assert pool.refcount(2) == 2
    pool.free([2, 2, 0])
    assert list(pool.free_blocks()) == [1, 3, 2, 0]
    with pytest.raises(BlockError, match="can't be referenced"):
        pool.incref([1, 5])
    assert list(pool.free_blocks()) == [1, 3, 2, 0]


def test_append_takes_a_block_exactly_when_a_boundary_is_crossed():
    pool = BlockPool(2, 4)
    table, other = BlockTable(pool), BlockTable(pool)
    assert table.append(3) == [0, 1, 2]
    other.append(4)
    assert table.append(1) == [3] and table.blocks == [0]
    before = state(pool)
    with pytest.raises(OutOfBlocks):
        table.append(1)
    assert state(pool) == before and (table.blocks, table.num_tokens) == ([0], 4)
    other.free()
    assert table.append(1) == [4] and table.blocks == [0, 1]


@pytest.mark.parametrize("length", range(1, 14))
def test_block_table_holds_the_ceiling_of_tokens_over_block_size(length):
    pool = BlockPool(16, 4)
    table = BlockTable(pool)
    table.append(length)
    for grown in range(8):
        assert len(table.blocks) == -(-(length + grown) // 4) == 16 - pool.num_free
        assert table.blocks_needed(1) == (1 if (length + grown) % 4 == 0 else 0)
        table.append(1)
    table.free()
    assert pool.num_free == 16 and table.num_tokens == 0


def test_fork_shares_everything_and_copies_only_the_tail_it_writes():
    pool = BlockPool(6, 4)
    parent = BlockTable(pool)
    parent.append(6)
    child = parent.fork()
    assert child.blocks == parent.blocks == [0, 1] and pool.refcount(1) == 2
    assert child.blocks_needed(1) == 1 and child.blocks_needed(3) == 2 and child.blocks_needed(0) == 0
    with pytest.raises(BlockError, match="block 1 is shared"):
        child.append(1)
    assert child.copy_on_write() == (1, 2) and child.blocks == [0, 2]
    assert child.append(1) == [2 * 4 + 2]
    assert parent.copy_on_write() is None, "after the child's copy, the parent owns its tail alone"
    assert pool.refcount(0) == 2 and pool.refcount(1) == pool.refcount(2) == 1


def test_copy_on_write_of_a_full_shared_tail_is_not_needed():
    pool = BlockPool(6, 4)
    parent = BlockTable(pool)
    parent.append(8)
    child = parent.fork()
    assert child.copy_on_write() is None and child.append(1) == [8]
    assert parent.append(1) == [12]


def test_copy_on_write_without_a_free_block_changes_nothing():
    pool = BlockPool(2, 4)
    parent = BlockTable(pool)
    parent.append(6)
    child = parent.fork()
    before = state(pool)
    with pytest.raises(OutOfBlocks):
        child.copy_on_write()
    assert state(pool) == before and child.blocks == parent.blocks


def test_truncate_frees_only_the_blocks_past_the_cut():
    pool = BlockPool(6, 4)
    table = BlockTable(pool)
    table.append(14)
    table.truncate(5)
    assert table.blocks == [0, 1] and table.num_tokens == 5
    assert list(pool.free_blocks()) == [4, 5, 3, 2], "tail first"
    with pytest.raises(ValueError, match="num_tokens is 6"):
        table.truncate(6)
    assert table.append(2) == [5, 6]


def test_copy_on_write_comes_before_a_truncated_fork_writes():
    pool = BlockPool(6, 4)
    parent = BlockTable(pool)
    parent.append(8)
    child = parent.fork()
    child.truncate(6)
    with pytest.raises(BlockError):
        child.append(1)
    assert child.copy_on_write() == (1, 2)


@pytest.mark.parametrize("start, stop", [(-1, 2), (3, 2), (0, 7), (7, 7)])
def test_slot_mapping_outside_the_table_is_rejected(start, stop):
    table = BlockTable(BlockPool(4, 4))
    table.append(6)
    with pytest.raises(ValueError, match="the table holds 0 … 6"):
        table.slot_mapping(start, stop)


class PoolMachine(RuleBasedStateMachine):
    """Tables that grow, fork, write, shrink and go, against a model that knows what each table's slots should hold."""

    tables = Bundle("tables")

    def __init__(self):
        super().__init__()
        self.size = 4
        self.pool = BlockPool(24, self.size, free_order=[(7 * i + 3) % 24 for i in range(24)])
        self.memory = {}
        self.live = {}
        self.counter = 0

    def write(self, table, n):
        copy = table.copy_on_write() if n else None  # nothing is written, nothing need be copied
        if copy is not None:
            src, dst = copy
            for offset in range(self.size):
                self.memory[dst * self.size + offset] = self.memory.get(src * self.size + offset)
        for slot in table.append(n):
            self.counter += 1
            self.memory[slot] = self.counter
            self.live[table].append(self.counter)

    @rule(target=tables)
    def new(self):
        table = BlockTable(self.pool)
        self.live[table] = []
        return table

    @rule(table=tables, n=st.integers(0, 11))
    def append(self, table, n):
        if table.blocks_needed(n) <= self.pool.num_free:
            self.write(table, n)
        else:
            before = state(self.pool), list(table.blocks), table.num_tokens
            with pytest.raises((OutOfBlocks, BlockError)):
                table.append(n)
            assert before == (state(self.pool), table.blocks, table.num_tokens)

    @rule(target=tables, table=tables)
    def fork(self, table):
        child = table.fork()
        self.live[child] = list(self.live[table])
        return child

    @rule(table=tables, data=st.data())
    def truncate(self, table, data):
        keep = data.draw(st.integers(0, table.num_tokens))
        table.truncate(keep)
        del self.live[table][keep:]

    @rule(table=consumes(tables))
    def free(self, table):
        table.free()
        del self.live[table]

    @precondition(lambda self: self.pool.num_free > 0)
    @rule()
    def free_again(self):
        before = state(self.pool)
        with pytest.raises(BlockError):
            self.pool.free([next(self.pool.free_blocks())])
        assert before == state(self.pool)

    @invariant()
    def refcount_is_the_number_of_tables_that_list_it(self):
        owners = [0] * self.pool.num_blocks
        for table in self.live:
            for block in table.blocks:
                owners[block] += 1
        assert owners == [self.pool.refcount(b) for b in range(self.pool.num_blocks)]

    @invariant()
    def every_block_is_free_or_owned(self):
        free = list(self.pool.free_blocks())
        assert len(free) == len(set(free)) == self.pool.num_free
        assert set(free) == {b for b in range(self.pool.num_blocks) if self.pool.refcount(b) == 0}

    @invariant()
    def every_table_still_reads_what_was_written_for_it(self):
        for table, tokens in self.live.items():
            assert [self.memory[slot] for slot in table.slot_mapping()] == tokens
            assert len(table.blocks) == -(-table.num_tokens // self.size)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


@pytest.mark.slow
def test_pool_is_sound_after_a_hundred_thousand_steps():
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(PoolMachine, settings=settings(
        max_examples=1000, stateful_step_count=100, deadline=None, derandomize=True))

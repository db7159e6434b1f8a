"""Request ids come from a set that another process can list."""

from workers.rids import GENERATIONS, Rids, possible_rids


def test_every_id_that_was_given_is_among_the_possible_ones() -> None:
    rids = Rids("e1")
    given = set()
    for _ in range(3):
        slots = [rids.take_slot() for _ in range(5)]
        given |= {rids.next(slot) for slot in slots for _ in range(3)}
        for slot in slots:
            rids.free_slot(slot)

    assert given <= set(possible_rids("e1-", rids.most))
    assert rids.most == 5


def test_no_id_begins_with_another() -> None:
    ids = list(possible_rids("e1-", 120))

    assert len({len(rid) for rid in ids}) == 1
    assert len(set(ids)) == len(ids) == 120 * GENERATIONS


def test_requests_of_a_slot_that_follow_each_other_have_other_ids() -> None:
    rids = Rids("e1")
    slot = rids.take_slot()

    assert len({rids.next(slot) for _ in range(GENERATIONS)}) == GENERATIONS

"""A server that lies in each message of the sum view, and clients that do.

After every lie `is_safe` holds: of what the clients said, the server and c clients can compute no
sum over fewer than h honest clients, and every client has released at most one input.
"""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sottovoce.client import messages, release, sum_protocol
from sottovoce.client.sum_protocol import Cohort, MemoryNotes, Party, RoundKey, SumTerms
from sottovoce.client.vault import Policy
from sottovoce.errors import InputError, Malformed, PolicyRefusal, RoundAnswered, RoundVoid
from sottovoce.models.base import Form
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import FULL
from support.sum_rounds import RUN, SIZE, Cohorts, Vector

pytestmark = pytest.mark.slow  # seconds of CPU in all; left out of the editing loop

REFUSALS = (Malformed, PolicyRefusal, RoundAnswered)


def forge(head, c, **changes):
    """Another member's key with other content, which only that member could sign."""
    keys = copy.deepcopy(head["keys"])
    keys[1].update(changes)
    return {**head, "keys": keys}


def resign(head, c, at=1, **changes):
    """The same by a corrupt client, which signs what it likes."""
    keys = copy.deepcopy(head["keys"])
    content = {**{k: v for k, v in keys[at].items() if k != "signature"}, **changes}
    signature = sum_protocol.sign(c.keys[content["member"]], "key", content)
    return {**head, "keys": [*keys[:at], {**content, "signature": signature}, *keys[at + 1 :]]}


def invent(head, c, count):
    """The server's own clients, in the place of real ones."""
    made = []
    for _ in range(count):
        key = Ed25519PrivateKey.generate()
        fake = Party(key, SumTerms(frozenset({sum_protocol.name_key(key.public_key())}), 1, 0),
                     MemoryNotes())  # fmt: skip
        made.append(fake.make_key(RUN, 0, Vector(np.zeros(1))).to_json())
    return {**head, "keys": sorted([*head["keys"], *made], key=lambda k: k["member"])}


def other_round(head, c, run=RUN, t=1):
    """A key that a member has really signed, for another round."""
    member = head["keys"][1]["member"]
    key = Party(c.keys[member], c.parties[member].terms, MemoryNotes()).make_key(
        run, t, Vector(np.zeros(1))
    )
    return {**head, "keys": [head["keys"][0], key.to_json(), *head["keys"][2:]]}


def drop(head, *places):
    return {**head, "keys": [k for i, k in enumerate(head["keys"]) if i not in places]}


def without(head, key, count):
    """Only so many of the entries."""
    return {**head, key: dict(sorted(head[key].items())[:count])}


def first_share(head, change):
    shares = dict(head["shares"])
    name = min(shares)
    shares[name] = change(shares[name])
    return {**head, "shares": shares}


def change_byte(text):
    """Change the first byte of a hexadecimal text, whatever it is."""
    return f"{int(text[:2], 16) ^ 1:02x}{text[2:]}"


def swap_shares(head, c):
    shares = dict(head["shares"])
    one, two = sorted(shares)[:2]
    shares[one], shares[two] = shares[two], shares[one]
    return {**head, "shares": shares}


def signed_by(head, c, names, content=None):
    """Signatures as these members would give them on this or another set."""
    cohort = Cohort.read(head["keys"], head["threshold"], RUN, 0)
    dealers = sorted({*head["shares"], *head["set"]})
    bound = cohort.bind_set(dealers, head["set"]) if content is None else content
    return {**head, "signatures": {m: sum_protocol.sign(c.keys[m], "set", bound) for m in names}}


LIES = {
    "shares": {
        # Seven clients, h = 3, c = 1: 2t > 8 and t ≥ 4.
        **{
            f"threshold {value}": lambda h, c, v=value: {**h, "threshold": v}
            for value in (4, 3, 1, 0, -1, 8, 5.0, True, None, "5", 10**400)
        },
        "no threshold": lambda h, c: {k: v for k, v in h.items() if k != "threshold"},
        "without my key": lambda h, c: {**h, "keys": [k for k in h["keys"] if k["member"] != c.me]},
        "too few of the roster": lambda h, c: {
            **h,
            "threshold": 3,
            "keys": [k for k in h["keys"] if k["member"] in [c.me, *c.others[:2]]],
        },
        "invented clients": lambda h, c: invent(h, c, 2),
        "many invented clients": lambda h, c: {**invent(h, c, 6), "threshold": 8},
        "a mask key of the server's own": lambda h, c: forge(h, c, mask_key="11" * 32),
        "a larger promise": lambda h, c: forge(h, c, promise=2**40),
        "more samples": lambda h, c: forge(h, c, samples=10**6),
        "another member's name": lambda h, c: forge(h, c, member="22" * 32),
        "another signature": lambda h, c: forge(h, c, signature="33" * 64),
        "an old key": other_round,
        "a key of another run": lambda h, c: other_round(h, c, run="feedbeef", t=0),
        "another model to one client": lambda h, c: resign(h, c, request="44" * 32),
        "a member twice": lambda h, c: {**h, "keys": [*h["keys"], h["keys"][1]]},
        "two members with one mask key": lambda h, c: resign(
            h, c, mask_key=h["keys"][2]["mask_key"]
        ),
        "a mask key of small order": lambda h, c: resign(h, c, mask_key="00" * 32),
        "a promise of nothing": lambda h, c: resign(h, c, promise=0),
        "a promise that is no number": lambda h, c: resign(h, c, promise="9"),
        "a promise beyond the grid": lambda h, c: resign(h, c, promise=2**53),
        "no samples": lambda h, c: resign(h, c, samples=0),
        "samples that are no number": lambda h, c: resign(h, c, samples=True),
        "a key without a field": lambda h, c: {**h, "keys": [{**h["keys"][0]}, {"t": 0}]},
        "a key with one more": lambda h, c: forge(h, c, more=1),
        "upper-case letters": lambda h, c: forge(h, c, request="AB" * 32),
        "a short name": lambda h, c: forge(h, c, member="ab"),
        **{
            f"keys {value!r:.8}": lambda h, c, v=value: {**h, "keys": v}
            for value in (None, [], {}, "x", [None], [[]], [1] * 7, [{}] * 2000)
        },
    },
    "input": {
        "shares of too few": lambda h, c: without(h, "shares", 2),
        "shares of one": lambda h, c: without(h, "shares", 1),
        "no shares": lambda h, c: {**h, "shares": {}},
        "shares that are none": lambda h, c: {**h, "shares": None},
        "a list of shares": lambda h, c: {**h, "shares": list(h["shares"])},
        "a share that was changed": lambda h, c: first_share(h, change_byte),
        "a share cut short": lambda h, c: first_share(h, lambda s: s[:-2]),
        "a share that is no text": lambda h, c: first_share(h, lambda s: 7),
        "a share that is no number": lambda h, c: first_share(h, lambda s: "zz"),
        "an empty share": lambda h, c: first_share(h, lambda s: ""),
        "shares of others swapped": swap_shares,
        "a share of a stranger": lambda h, c: {**h, "shares": {**h["shares"], "55" * 32: "00"}},
        "my own share": lambda h, c: {**h, "shares": {**h["shares"], c.me: "00"}},
        "another cohort": lambda h, c: {
            **h, "keys": [k for k in h["keys"] if k["member"] != c.others[-1]],
            "shares": {m: s for m, s in h["shares"].items() if m != c.others[-1]},
        },
        "another threshold": lambda h, c: {**h, "threshold": 6},
        "a smaller threshold": lambda h, c: {**h, "threshold": 4},
    },
    "set": {
        "a set below the threshold": lambda h, c: {**h, "set": h["set"][:4]},
        "a set of one": lambda h, c: {**h, "set": [c.me]},
        "an empty set": lambda h, c: {**h, "set": []},
        "a set in disorder": lambda h, c: {**h, "set": h["set"][::-1]},
        "a member twice in the set": lambda h, c: {**h, "set": sorted([*h["set"], h["set"][0]])},
        "an unknown member in the set": lambda h, c: {**h, "set": [*h["set"][:-1], "ff" * 32]},
        "a set of numbers": lambda h, c: {**h, "set": [1, 2, 3, 4, 5]},
        "a set that is none": lambda h, c: {**h, "set": None},
        "other dealers": lambda h, c: {
            **h, "dealers": h["dealers"][:-1], "set": list(h["dealers"][:-1])
        },
        "dealers without the client": lambda h, c: {
            **h, "dealers": [m for m in h["dealers"] if m != c.me],
            "set": [m for m in h["set"] if m != c.me],
        },
        "a set beyond the dealers": lambda h, c: {**h, "dealers": h["dealers"][:5]},
        "the set of another cohort": lambda h, c: {
            **h,
            "keys": [k for k in h["keys"] if k["member"] != c.others[-1]],
            "dealers": [m for m in h["dealers"] if m != c.others[-1]],
            "set": [m for m in h["set"] if m != c.others[-1]],
        },
        "the set of another threshold": lambda h, c: {**h, "threshold": 6},
    },
    "unmask": {
        "no signatures": lambda h, c: {**h, "signatures": {}},
        "signatures that are none": lambda h, c: {**h, "signatures": None},
        "one signature less": lambda h, c: without(h, "signatures", 4),
        "one signature many times": lambda h, c: {
            **h, "signatures": dict.fromkeys(h["signatures"], h["signatures"][c.me])
        },
        "signatures by the server": lambda h, c: {
            **h,
            "signatures": {
                m: sum_protocol.sign(Ed25519PrivateKey.generate(), "set", "x") for m in h["set"]
            },
        },
        "signatures on another set": lambda h, c: signed_by(h, c, c.names, "66" * 32),
        "signatures that are no text": lambda h, c: {
            **h, "signatures": dict.fromkeys(h["signatures"], 7)
        },
        "signatures of keys": lambda h, c: {
            **h, "signatures": {k["member"]: k["signature"] for k in h["keys"]}
        },
        "another set, with signatures": lambda h, c: signed_by(
            {**h, "set": [m for m in h["set"] if m != c.others[0]]}, c, c.names
        ),
        "the client outside the set, with signatures": lambda h, c: signed_by(
            {**h, "set": [m for m in h["set"] if m != c.me]}, c, c.names
        ),
        "other dealers, with signatures": lambda h, c: signed_by(
            {
                **h,
                "shares": {m: s for m, s in h["shares"].items() if m != c.others[0]},
                "set": [m for m in h["set"] if m != c.others[0]],
            },
            c,
            c.names,
        ),
        "a set below the threshold, with signatures": lambda h, c: signed_by(
            {**h, "set": h["set"][:4]}, c, c.names
        ),
        "another threshold": lambda h, c: {**h, "threshold": 4},
        "a share that was changed": lambda h, c: first_share(h, change_byte),
        "no shares": lambda h, c: {**h, "shares": {}},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("step", "lie"), [(step, lie) for step, lies in LIES.items() for lie in lies]
)
def test_a_server_that_lies_is_refused_and_learns_no_single_input(step, lie):
    """The client in the middle is lied to; the others are told the truth and go on."""
    c = Cohorts(7, honest=3, corrupt=1)
    c.me = sorted(c.names)[0]
    c.others = sorted(c.names)[1:]
    c.change = lambda s, m, head: LIES[s][lie](head, c) if (s, m) == (step, c.me) else head
    result = None
    with contextlib.suppress(RoundVoid):  # with a bug the others may be too few
        result = c.play()
    assert [(s, m) for s, m, _ in c.refused][:1] == [(step, c.me)]
    assert isinstance(c.refused[0][2], REFUSALS)
    assert c.is_safe()
    assert c.is_safe(corrupt=c.others[:1])
    # What the honest have summed is right, with or without the client that was lied to.
    assert result is not None
    assert np.array_equal(result.total, c.expect(result.keys))


@pytest.mark.parametrize("lie", LIES["shares"] | LIES["input"] | LIES["set"] | LIES["unmask"])
def test_a_lie_told_to_everyone_ends_in_nothing(lie):
    step = next(step for step, lies in LIES.items() if lie in lies)
    c = Cohorts(7, honest=3, corrupt=1)

    def change(s, member, head):
        c.me, c.others = member, sorted(set(c.names) - {member})
        return LIES[s][lie](head, c) if s == step else head

    c.change = change
    with pytest.raises(RoundVoid):
        c.play()
    assert c.is_safe()
    assert c.is_safe(corrupt=c.names[:1])
    assert not c.find_exposed()


def test_s2_two_sets_of_one_round_are_never_unmasked():
    """A server that wants a single input asks for the set with it and for the set without it."""
    c = Cohorts(7, honest=3, corrupt=1)
    c.play()
    heads = {m: h for s, m, h in c.sent if s == "set"}
    unmask = {m: h for s, m, h in c.sent if s == "unmask"}
    target = c.names[3]
    said = len(c.said)
    for member in c.names:
        smaller = [m for m in heads[member]["set"] if m != target]
        assert c.tell("set", member, {**heads[member], "set": smaller}) is None
        lied = signed_by({**unmask[member], "set": smaller}, c, c.names)
        assert c.tell("unmask", member, lied) is None
    assert len(c.said) == said
    assert c.is_safe(corrupt=c.names[:1])


@pytest.mark.parametrize("corrupt", [0, 1])
def test_half_of_the_cohort_is_shown_another_set(corrupt):
    """Sets A and B get at most K + c signatures together, and each needs more than half of that."""
    c = Cohorts(7, honest=3, corrupt=1)
    lost = c.names[-1]
    half = set(c.names[:4])

    def change(step, member, head):
        if step == "set" and member not in half:
            return {**head, "set": [m for m in head["set"] if m != lost]}
        return head

    c.change = change
    with pytest.raises(RoundVoid, match="signed the set"):
        c.play()
    # The corrupt client signs both: neither set has the threshold's five signatures.
    heads = {m: h for s, m, h in c.sent if s == "set"}
    cohort = Cohort.read(heads[lost]["keys"], heads[lost]["threshold"], RUN, 0)
    dealers = heads[lost]["dealers"]
    for members in (sorted(c.names), sorted(set(c.names) - {lost})):
        bound = cohort.bind_set(dealers, members)
        signed = [m for m, s in c.steps("set").items()
                  if sum_protocol.is_signed(m, "set", bound, s["signature"])]  # fmt: skip
        assert len(set(signed) | set(c.names[:corrupt])) < cohort.threshold
    assert c.is_safe(corrupt=c.names[:1])


@pytest.mark.parametrize(
    ("count", "honest", "corrupt"),
    [(7, 3, 1), (9, 4, 1), (10, 3, 0), (10, 5, 1), (12, 6, 2), (15, 8, 1)],
)
def test_an_input_made_for_fewer_dealers_is_not_opened_with_another_list(count, honest, corrupt):
    """S1: a few clients hear of t dealers, all others of K; the set has the few and those others.

    Of the few's dealers all but themselves and the corrupt ones are said to have dropped out: their
    keys are revealed, and with them the masks between them and the few.
    """
    c = Cohorts(count, honest=honest, corrupt=corrupt)
    names, t = sorted(c.names), c.threshold
    bad, good = names[:corrupt], names[corrupt:]
    few, heard = good[: 2 * t - count - corrupt], sorted([*bad, *good[: t - corrupt]])
    members = sorted({*bad, *few} | (set(names) - set(heard)))
    assert len(heard) == len(members) == t
    common = {"keys": [c.tell("keys", m, {"step": "keys"})["key"] for m in names], "threshold": t}
    dealt = {m: c.tell("shares", m, {"step": "shares", **common})["shares"] for m in names}

    def seal(member, dealers):
        return {**common, "shares": {d: dealt[d][member] for d in dealers if d != member}}

    for member in few:
        assert c.tell("input", member, {"step": "input", **seal(member, heard)})
    shown = {**common, "step": "set", "dealers": names, "set": members}
    said = {m: c.tell("set", m, shown) for m in names}
    signed = {m: told["signature"] for m, told in said.items() if told is not None}
    assert len(signed) >= t  # who was asked for no input may sign any list of dealers
    for member in names:
        told = {**seal(member, names), "set": members, "signatures": signed}
        c.tell("unmask", member, {"step": "unmask", **told})
    assert c.is_safe(corrupt=bad)


def test_a_retry_gets_the_same_answer_and_a_replay_of_an_older_round_none():
    c = Cohorts(5)
    c.play(t=0)
    first = {(s, m): h for s, m, h in c.sent}
    answers = {(s, m): h for s, m, h in c.said}
    for (step, member), head in first.items():
        if step != "input":  # the device sends its stored bytes before it looks any further
            assert c.tell(step, member, head) == answers[step, member]
    for booking in c.bookings.values():
        booking.stored = None
        booking.noises.clear()
    c.play(t=1)
    before = len(c.said)
    for (step, member), head in first.items():
        if step != "keys":
            assert c.tell(step, member, head, t=1) is None  # keys and sets of round 0
            assert c.tell(step, member, head, t=0) is None  # whose secret is kept no longer
    assert len(c.said) == before


def test_who_has_signed_a_set_gives_no_input_any_more():
    c = Cohorts(5)
    late = c.names[0]
    kept = {}

    def change(step, member, head):
        if (step, member) == ("input", late):
            kept[step] = head
            return None
        return head

    c.change = change
    c.play()
    assert late in c.steps("set")
    assert c.tell("input", late, kept["input"]) is None
    assert not c.bookings[late].noises


def test_a_client_whose_key_was_revealed_is_safe_although_its_input_arrives_late():
    """The server says that it has dropped out, learns its key, and keeps its masked input."""
    c = Cohorts(7, honest=3, corrupt=1)
    lost = c.names[2]
    c.answered = lambda step, m, blob: None if (step, m) == ("input", lost) else blob
    result = c.play()
    assert lost not in result.keys
    assert c.bookings[lost].noises
    assert all(lost in said["key"] for said in c.steps("unmask").values())
    assert not any(lost in said["seed"] for said in c.steps("unmask").values())
    assert c.is_safe(corrupt=c.names[:1])
    fresh = [h["key"]["mask_key"] for s, m, h in c.said if (s, m) == ("keys", lost)]
    for booking in c.bookings.values():
        booking.stored = None
    c.answered = lambda step, m, blob: blob
    again = c.play(t=1)
    assert np.array_equal(again.total, c.expect(again.keys))
    assert c.steps("keys")[lost]["key"]["mask_key"] not in fresh  # re-keyed before it takes part


def test_s4_strangers_count_for_nothing():
    """S4: two roster members and three of the server's own are no five of the roster."""
    keys = [Ed25519PrivateKey.generate() for _ in range(4)]
    roster = frozenset(sum_protocol.name_key(key.public_key()) for key in keys)
    party = Party(keys[0], SumTerms(roster, 3, 1), MemoryNotes())
    own = party.make_key(RUN, 0, Vector(np.zeros(1)))
    made = [own]
    for _ in range(9):
        key = Ed25519PrivateKey.generate()
        alone = SumTerms(frozenset({sum_protocol.name_key(key.public_key())}), 1, 0)
        stranger = Party(key, alone, MemoryNotes())
        made.append(stranger.make_key(RUN, 0, Vector(np.zeros(1), sigma=2**50)))
    for threshold in (6, 8, 10):
        cohort = Cohort.read([k.to_json() for k in made], threshold, RUN, 0)
        with pytest.raises(PolicyRefusal):
            party.deal_shares(cohort)
    assert party.list_promises(cohort, list(cohort.keys)) == []


def test_s4_a_set_that_only_others_accept_does_not_open_a_clients_input():
    """S4: with t signatures a set is unmasked, also one that a client in it has refused.

    Three of ten are strangers to one client, which needs six of its roster. The others know all
    ten, and accept eight of them: five of its roster.
    """
    c = Cohorts(10, honest=5, corrupt=1)
    me, *others = c.names
    strangers, silent = others[:3], others[-2:]
    terms = SumTerms(frozenset(c.names) - set(strangers), 5, 1)
    c.parties[me] = Party(c.keys[me], terms, MemoryNotes())
    c.answered = lambda step, member, blob: None if step == "input" and member in silent else blob
    with contextlib.suppress(RoundVoid):
        c.play(threshold=8)
    for corrupt in others[3:-2]:  # and the strangers, who may be the server
        mine = [group for group in c.find_exposed([*strangers, corrupt]) if me in group]
        assert all(len(group) >= terms.honest for group in mine)


CLIENT_LIES = {
    "keys": {
        "no key": lambda h: {**h, "key": None},
        "a number": lambda h: {**h, "key": 7},
        "another run": lambda h: {**h, "key": {**h["key"], "run": "feedbeef"}},
        "another promise": lambda h: {**h, "key": {**h["key"], "promise": 2**40}},
        "another name": lambda h: {**h, "key": {**h["key"], "member": "77" * 32}},
        "another request": lambda h: {**h, "key": {**h["key"], "request": "77" * 32}},
        "a field less": lambda h: {**h, "key": {"run": RUN}},
        "nothing": lambda h: {},
    },
    "shares": {
        "no shares": lambda h: {**h, "shares": None},
        "shares for few": lambda h: {**h, "shares": dict(list(h["shares"].items())[:2])},
        "shares for strangers": lambda h: {**h, "shares": {**h["shares"], "88" * 32: "00"}},
        "shares that are numbers": lambda h: {**h, "shares": dict.fromkeys(h["shares"], 7)},
        "no seal": lambda h: {**h, "seal": None},
        "a short seal": lambda h: {**h, "seal": "00"},
    },
    "input": {
        "no noise": lambda h: {**h, "noise": None},
        "less noise than promised": lambda h: {**h, "noise": 1},
        "noise beyond the grid": lambda h: {**h, "noise": 2**60},
        "noise that is no number": lambda h: {**h, "noise": 1e10},
    },
    "set": {
        "no signature": lambda h: {},
        "another signature": lambda h: {**h, "signature": "99" * 64},
        "a signature that is no text": lambda h: {**h, "signature": 7},
    },
    "unmask": {
        "nothing": lambda h: {},
        "no seeds": lambda h: {**h, "seed": {}},
        "keys of the set": lambda h: {**h, "key": h["seed"]},
        "shares that are none": lambda h: {**h, "seed": dict.fromkeys(h["seed"], "zz")},
        "shares beyond the field": lambda h: {**h, "seed": dict.fromkeys(h["seed"], "ff" * 33)},
        "wrong shares": lambda h: {**h, "seed": dict.fromkeys(h["seed"], "00" * 33)},
    },
}


@pytest.mark.parametrize(
    ("step", "lie"), [(step, lie) for step, lies in CLIENT_LIES.items() for lie in lies]
)
def test_a_round_closes_without_the_client_that_lies(step, lie):
    c = Cohorts(7, honest=3, corrupt=1)
    bad = c.names[3]

    def answered(s, member, blob):
        if (s, member) != (step, bad):
            return blob
        head, arrays = messages.unpack(blob, words=s == "input")
        return messages.pack(CLIENT_LIES[step][lie](head), arrays)

    c.answered = answered
    result = c.play()
    assert np.array_equal(result.total, c.expect(result.keys))
    assert (bad in result.keys) == (step in ("set", "unmask"))
    assert c.is_safe(corrupt=[bad])


def test_two_of_fifty_that_reveal_wrong_shares_do_not_void_a_round():
    """45 right shares of 50 are found among a thousand times more choices than two liars spoil."""
    c = Cohorts(50, honest=40, corrupt=5)
    bad = c.names[7], c.names[31]

    def answered(s, member, blob):
        if s != "unmask" or member not in bad:
            return blob
        head, _ = messages.unpack(blob)
        return messages.pack({**head, "seed": dict.fromkeys(head["seed"], "00" * 33)})

    c.answered = answered
    result = c.play()
    assert len(result.keys) == 50
    assert np.array_equal(result.total, c.expect(result.keys))


@pytest.mark.parametrize("words", [np.zeros(SIZE - 1, np.uint64), np.zeros((SIZE, 1), np.uint64)])
def test_an_input_of_another_size_takes_no_part(words):
    c = Cohorts(5)
    bad = c.names[1]
    lie = messages.pack({"noise": 2**34}, {"masked": words})
    c.answered = lambda s, m, blob: lie if (s, m) == ("input", bad) else blob
    result = c.play()
    assert bad not in result.keys
    assert np.array_equal(result.total, c.expect(result.keys))


def test_a_share_that_does_not_open_keeps_its_receiver_out_before_it_pays():
    c = Cohorts(7, honest=3, corrupt=1)
    bad, victim = c.names[0], c.names[1]

    def answered(s, member, blob):
        if (s, member) != ("shares", bad):
            return blob
        head, _ = messages.unpack(blob)
        head["shares"][victim] = "00" * len(bytes.fromhex(head["shares"][victim]))
        return messages.pack(head)

    c.answered = answered
    result = c.play()
    assert victim not in result.keys
    assert not c.bookings[victim].noises
    assert np.array_equal(result.total, c.expect(result.keys))


@pytest.mark.parametrize("step", ["keys", "shares", "input", "set", "unmask"])
@pytest.mark.parametrize("silent", [1, 2, 3])
def test_silent_clients_end_nothing_or_the_round(step, silent):
    """Five of seven are needed: with two silent ones the sum is right, with three there is none.

    Who sends no key is not counted: four are a cohort of their own, as h + c are.
    """
    c = Cohorts(7, honest=3, corrupt=1)
    quiet = c.names[: silent + (step == "keys")]
    c.answered = lambda s, m, blob: None if s == step and m in quiet else blob
    if silent == 3:
        with pytest.raises(RoundVoid, match="void"):
            c.play()
        assert step == "unmask" or not c.find_exposed()
    else:
        result = c.play()
        assert np.array_equal(result.total, c.expect(result.keys))
    assert c.is_safe(corrupt=c.names[-1:])


@pytest.mark.parametrize("trial", range(40))
def test_no_random_server_learns_a_single_input(trial):
    """Messages dropped, changed, replayed and shown to others at random."""
    rng = np.random.default_rng(trial)
    c = Cohorts(6, honest=2, corrupt=1)
    every = [lie for lies in LIES.values() for lie in lies.values()]
    seen: list = []

    def change(step, member, head):
        c.me, c.others = member, sorted(set(c.names) - {member})
        seen.append((step, member, head))
        kind = rng.integers(0, 12)
        if kind == 0:
            return None
        if kind == 1:
            return seen[rng.integers(len(seen))][2] | {"step": step}
        if kind == 2:
            try:
                return every[rng.integers(len(every))](head, c)
            except (KeyError, IndexError, TypeError, AttributeError, ValueError):
                return head
        return head

    c.change = change
    with contextlib.suppress(RoundVoid):
        c.play()
    for step, _, head in seen:  # afterwards everything is tried on everybody once more
        member = c.names[rng.integers(len(c.names))]
        if step in ("set", "unmask") and rng.integers(0, 2):
            c.tell(step, member, head)
    assert c.is_safe()
    assert c.is_safe(corrupt=[c.names[0]])


def test_s1_nothing_is_revealed_before_t_signatures_on_one_set():
    c = Cohorts(7, honest=3, corrupt=1)
    c.answered = lambda step, m, blob: None if step == "set" else blob
    with pytest.raises(RoundVoid):
        c.play()
    signatures = {m: said["signature"] for m, said in c.steps("set").items()}
    sealed = {m: head for step, m, head in c.sent if step == "input"}
    for count in range(8):
        some = dict(list(signatures.items())[:count])
        head = {**sealed[c.names[0]], "step": "unmask", "set": sorted(c.names), "signatures": some}
        told = c.tell("unmask", c.names[0], head)
        assert (told is None) == (count < c.threshold)


def test_s3_no_client_reveals_both_shares_of_one_client():
    c = Cohorts(7, honest=3, corrupt=1)
    lost = c.names[5]
    c.answered = lambda step, m, blob: None if (step, m) == ("input", lost) else blob
    with contextlib.suppress(RoundVoid):  # the server refuses too much as well
        c.play()
    for said in c.steps("unmask").values():
        assert not said["seed"].keys() & said["key"].keys()
        assert set(said["key"]) == {lost}


def test_s5_a_stream_of_masks_serves_one_round_of_one_run():
    """Equal streams in two rounds would cancel: the difference of two inputs would be plain."""
    c = Cohorts(5)
    blobs = []
    c.answered = lambda step, m, b: (blobs.append(b) if step == "input" and m == one else 0, b)[1]
    one = c.names[0]
    for t in (0, 1):
        for booking in c.bookings.values():
            booking.stored = None
        c.play(t=t)
    first, second = (messages.unpack(blob, words=True)[1]["masked"] for blob in blobs)
    assert not np.any(first == second)
    key, other = bytes(range(32)), sum_protocol.compute_public(bytes(range(1, 33)))
    streams = {sum_protocol.derive_mask(key, other, run, t) for run in ("a", "b") for t in (0, 1)}
    assert len(streams) == 4


def test_s6_the_noise_is_inside_the_masked_value():
    """Standard deviation within 5 % at 20,000 draws: a false alarm once in 10¹¹."""
    form, recipe = Form("svm", (20_000,), 2, {"kappa": 0.0}), Recipe(1.0, 1.0)
    params = {"b": np.zeros(()), "w": np.zeros(20_000)}
    x, y = np.zeros((1, 20_000)), np.array([1])
    mask = sum_protocol.expand_mask(bytes(32), 20_001)
    made = [
        release.release_masked(form, params, x, y, recipe=recipe, noise=2**33, mask=mask, head={})
        for _ in range(2)
    ]
    first, second = (messages.unpack(m.blob, words=True) for m in made)
    noise = (first[1]["masked"] - mask).view(np.int64)[1:]
    other = (second[1]["masked"] - mask).view(np.int64)[1:]
    assert abs(noise.std() / 2**33 - 1) < 0.05
    assert abs(np.corrcoef(noise, other)[0, 1]) < 0.05
    assert first[0] == {"noise": 2**33}  # nothing else is said about the rows


def test_s7_what_a_client_says_besides_its_input_depends_on_no_row(monkeypatch):
    """Two cohorts with equal keys and secrets, and other inputs."""
    said = []
    for shift in (0, 12345):
        c = Cohorts(5)
        rng = np.random.default_rng(1)
        keys = [Ed25519PrivateKey.from_private_bytes(rng.bytes(32)) for _ in range(5)]
        names = [sum_protocol.name_key(key.public_key()) for key in keys]
        monkeypatch.setattr(sum_protocol.os, "urandom", rng.bytes)
        terms = SumTerms(frozenset(names), 2, 1)
        c.parties = {n: Party(k, terms, MemoryNotes()) for n, k in zip(names, keys, strict=True)}
        c.bookings = {n: Vector(np.arange(SIZE) + shift) for n in names}
        c.names, c.keys = names, dict(zip(names, keys, strict=True))
        c.play()
        said.append(c.said)
    assert said[0] == said[1]


def test_the_noises_of_a_round_make_up_for_every_client():
    """Whatever c clients and the server take away, h noises are worth σ_i² for each client i."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        count, honest = int(rng.integers(2, 9)), 0
        honest = int(rng.integers(1, count + 1))
        sigma = [int(value) for value in 2.0 ** rng.uniform(31, 36, count)]
        promises = [sum_protocol.promise_noise(s, float(honest)) for s in sigma]
        noise = [
            sum_protocol.complete_noise(
                sigma[i], promises[i], promises[:i] + promises[i + 1 :], honest, share=honest
            )
            for i in range(count)
        ]
        for i in range(count):
            others = sorted(noise[:i] + noise[i + 1 :])[: honest - 1]
            assert noise[i] ** 2 + sum(s**2 for s in others) >= sigma[i] ** 2
            assert honest * noise[i] ** 2 >= sigma[i] ** 2


def test_a_secret_needs_t_shares_and_fewer_say_nothing():
    secret = bytes(range(32))
    shares = sum_protocol.split_secret(secret, 4, 9, bytes(32))
    points = {x: shares[x - 1] for x in (2, 3, 7, 9)}
    assert sum_protocol.join_shares(points) == int.from_bytes(secret)
    three = {x: points[x] for x in (2, 3, 7)}
    assert sum_protocol.join_shares(three) != int.from_bytes(secret)
    for guess in (0, 1, int.from_bytes(secret)):  # every secret fits three shares
        weights = sum_protocol.lagrange_weights([2, 3, 7, 9])
        rest = (guess - sum(weights[x] * three[x] for x in three)) % sum_protocol.PRIME
        fourth = rest * pow(weights[9], -1, sum_protocol.PRIME) % sum_protocol.PRIME
        assert sum_protocol.join_shares({**three, 9: fourth}) == guess


def test_a_roster_that_cannot_be_used_is_refused_in_a_sentence(tmp_path):
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    pem = [
        Ed25519PrivateKey.generate().public_key().public_bytes(
            Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        for _ in range(3)
    ]  # fmt: skip
    path = tmp_path / "roster.pem"
    path.write_bytes(b"".join(pem))
    assert len(sum_protocol.read_roster(path)) == 3
    for content, word in (
        (b"", "Ed25519"),
        (b"".join([*pem, pem[0]]), "two clients have one key"),
        (b"".join(pem)[:-30], "nothing else"),
        (b"".join(pem).replace(b"MCow", b"MCov"), "damaged"),
        (b"\xff\xfe", "damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=word):
            sum_protocol.read_roster(path)
    with pytest.raises(InputError, match="No such file"):
        sum_protocol.read_roster(tmp_path / "none.pem")
    with pytest.raises(InputError, match=r"honest \+ corrupt = 4"):
        SumTerms(frozenset({"a", "b", "c"}), 3, 1)


def test_a_key_reads_back_and_nothing_else_does():
    c = Cohorts(3)
    key = c.parties[c.names[0]].make_key(RUN, 0, Vector(np.zeros(1)))
    assert RoundKey.from_json(key.to_json()) == key
    for name, value in (("t", -1), ("promise", 0), ("samples", 2**40), ("run", 7), ("member", "")):
        with pytest.raises(Malformed):
            RoundKey.from_json({**key.to_json(), name: value})


def test_the_arithmetic_of_sums_by_example():
    """Noise is rounded up, thresholds are the smallest that hold, a grid has room or has not."""
    assert sum_protocol.complete_noise(1000, 500, [500] * 3, 4, share=4.0) == 501
    assert sum_protocol.complete_noise(1000, 500, [100, 500, 500], 4, share=4.0) == 700
    assert [sum_protocol.promise_noise(sigma, 4.0) for sigma in (1000, 1001)] == [501, 501]
    assert sum_protocol.choose_threshold(10, 5, 2) == 7
    assert sum_protocol.choose_threshold(10, 8, 1) == 9
    assert sum_protocol.has_room(40_000, 2.0**35, 50)
    assert not sum_protocol.has_room(2**33, 2.0**35, 50)
    shares = sum_protocol.split_secret(bytes(31) + b"\x07", 2, 3, bytes(32))
    assert sum_protocol.join_shares({1: shares[0], 3: shares[2]}) == 7
    assert sum_protocol.join_shares({2: shares[1], 3: shares[2]}) == 7
    with pytest.raises(InputError, match=r"at least honest \+ corrupt = 3 keys, got 2"):
        sum_protocol.SumTerms(frozenset({"aa", "bb"}), honest=2, corrupt=1)
    policy = Policy(epsilon=1, delta=1e-5, samples=9, clip=1, honest=9, epsilon_alone=2)
    assert round(policy.count_alone(policy.capacity()) / FULL, 4) == 3.501

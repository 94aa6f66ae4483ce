"""What comes wrong on a link or in the data channel is dropped, counted by its kind, and does not disturb the rest."""

from collections.abc import Iterator
from random import Random

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import WireError
from common.ids import BlockId, PeerId, RequestId
from common.service import Received
from common.wire import Envelope, GatewayStatus, KVBlocks, KVFetch, KVRelease, Message, WorkerStatus, decode, encode
from tests.service.kv_rig import DEADLINE_S, Rig, block, key, with_shard
from tests.service.link_nodes import Node, RawPeer
from tests.unit.wire_messages import MESSAGE_TYPES, values_of
from tests.unit.wire_mutations import mutate

NUM_MESSAGES = 40
NUM_MUTATIONS = 10
"""Of one message."""
FUZZ = PeerId("fuzz#1")
BLOCKS = range(10, 34)
TAMPERED_SHARE = 0.05
messages = st.sampled_from(MESSAGE_TYPES).flatmap(values_of)


def frames_of(envelope: Envelope) -> list[bytes]:
    return [bytes(frame) for frame in encode(envelope)]


def decoded(frames: list[bytes]) -> Envelope | None:
    try:
        return decode(frames)
    except WireError:
        return None


class Link:
    """A real node, and a peer that sends it what no service would."""

    def __init__(self) -> None:
        self.node = Node("victim")
        self.raw = RawPeer()
        self.raw.connect(self.node.address)
        self.num_sent = 0
        self.num_malformed = 0

    def send(self, frames: list[bytes]) -> None:
        self.raw.send_frames([*frames])
        self.num_sent += 1
        self.num_malformed += decoded(frames) is None

    def wait_until_read(self) -> None:
        """By a status behind all that was sent."""
        self.num_sent += 1
        name = str(self.num_sent)
        self.raw.send(self.node.id, 0, GatewayStatus(name=name, address=self.raw.address, leases=()))
        self.node.wait_for(lambda: name in [status.name for status in self.statuses() if status.name])

    def statuses(self) -> list[WorkerStatus | GatewayStatus]:
        messages = [event.message for event in self.node.events if isinstance(event, Received)]
        return [message for message in messages if isinstance(message, WorkerStatus | GatewayStatus)]

    def close(self) -> None:
        self.node.links.close()
        self.raw.close()


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    yield link
    link.close()


def test_every_message_on_a_link_is_taken_or_counted_as_refused(link: Link) -> None:
    @given(messages, st.integers(0, 2**32))
    @settings(max_examples=NUM_MESSAGES, deadline=None)
    def run(message: Message, seed: int) -> None:
        random = Random(seed)
        for _ in range(NUM_MUTATIONS):
            link.send(mutate(frames_of(Envelope(FUZZ, link.node.id, link.num_sent, message)), random))

    run()
    link.wait_until_read()
    counters = link.node.links.counters()
    refused = {name: count for name, count in counters.items() if name.startswith("links_refused_")}
    assert sum(refused.values()) + counters["links_received"] + len(link.statuses()) == link.num_sent
    assert refused["links_refused_malformed"] >= link.num_malformed > 0
    assert counters["links_received"] > 0
    assert link.node.links.is_alive


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig("tcp", pull_timeout_s=0.3)
    yield rig
    rig.close()


def test_every_message_to_a_source_is_answered_or_counted_as_refused(rig: Rig) -> None:
    num_fetches = num_malformed = 0
    context = zmq.Context()
    receiver = context.socket(zmq.DEALER)
    receiver.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
    receiver.connect(rig.server.shard.data_address)

    @given(messages, st.integers(0, 2**32))
    @settings(max_examples=NUM_MESSAGES, deadline=None)
    def run(message: Message, seed: int) -> None:
        nonlocal num_fetches, num_malformed
        random = Random(seed)
        for _ in range(NUM_MUTATIONS):
            frames = mutate(frames_of(Envelope(FUZZ, rig.server.shard.peer, 1, message)), random)
            receiver.send_multipart(frames)
            envelope = decoded(frames)
            match envelope.message if envelope else None:
                case KVFetch():
                    num_fetches += 1
                    assert isinstance(decode(receiver.recv_multipart()).message, KVBlocks)
                case KVRelease() if envelope and envelope.to == rig.server.shard.peer:
                    pass
                case _:
                    num_malformed += 1

    try:
        run()
        last = KVFetch(request_id=RequestId("r"), attempt=0, block_ids=(), first_head=0, num_heads=1, with_data=True)
        receiver.send_multipart(encode(Envelope(FUZZ, rig.server.shard.peer, 1, last)))
        receiver.recv_multipart()
    finally:
        context.destroy(linger=0)
    counters = rig.server.counters()
    assert counters["kv_fetches"] == counters["kv_fetches_refused"] == num_fetches + 1
    assert counters["kv_refused_malformed"] == num_malformed
    assert counters["kv_sent_blocks"] == 0


class TamperingSource:
    """Answers fetches with a rig's blocks, one a run, of which some are tampered with. Mutable: how many it sent."""

    def __init__(self, rig: Rig, random: Random) -> None:
        self._rig = rig
        self._random = random
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind("ipc://*")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.num_sent = 0

    def serve(self, wait_ms: int) -> None:
        """What comes within so long."""
        while self._socket.poll(wait_ms):
            receiver, *frames = self._socket.recv_multipart()
            envelope = decode(frames)
            assert isinstance(envelope.message, KVFetch)
            for first, block_id in enumerate(envelope.message.block_ids):
                frames = frames_of(self._answer(envelope, envelope.message, first, block_id))
                if self._random.random() < TAMPERED_SHARE:
                    frames = mutate(frames, self._random)
                self._socket.send_multipart([receiver, *frames])
                self.num_sent += 1

    def _answer(self, envelope: Envelope, fetch: KVFetch, first: int, block_id: BlockId) -> Envelope:
        run = KVBlocks(
            request_id=fetch.request_id, attempt=fetch.attempt, refusal="", first=first, block_ids=(block_id,)
        )
        buffers = [block(self._rig.sent, block_id)]
        return Envelope(self._rig.source.peer, envelope.sender, envelope.seq, run, buffers)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.mark.parametrize("seed", range(3))
def test_a_pull_from_a_tampering_source_ends_with_the_right_bytes_or_an_error_and_all_is_counted(
    seed: int, rig: Rig
) -> None:
    source = TamperingSource(rig, Random(seed))
    errors: list[str] = []
    try:
        for number in range(12):
            pulled = rig.pull(key(number), BLOCKS, with_shard(rig.source, data_address=source.address))
            while not rig.events.finished(key(number)):
                source.serve(wait_ms=5)
            errors.append(rig.wait(key(number)).error)
            if not errors[-1]:
                rig.check_arrived(pulled)
        rig.wait_until(lambda: num_counted(rig) >= source.num_sent)
    finally:
        source.close()
    assert "" in errors
    assert num_counted(rig) - source.num_sent <= rig.counter("kv_pulls_failed") == len(errors) - errors.count("")
    assert rig.puller.is_alive


def num_counted(rig: Rig) -> float:
    """Answers that became part of a pull, were refused by kind, or, with a reason of the source, ended a pull."""
    counters = rig.puller.counters()
    num_refused = sum(count for name, count in counters.items() if name.startswith("kv_refused_"))
    return num_refused + counters["kv_received_blocks"] + counters["kv_pulls_failed"]

"""KV events as a router reads them: with libzmq, and with msgspec structs of vLLM's layout.

The test starts a deployment of its own, as test_contracts.py does.
"""

import socket
import time

import httpx2
import msgspec
import pytest
import zmq
from test_contracts import BASE, EXAMPLES, WATCHDOG_S, Deployment

TOPIC = b"kv@host@smollm2"
BLOCK_TOKENS = 16
TEXT = "A router sends a request to the host that has computed the longest prefix of its prompt. " * 4
END = (2**64 - 1).to_bytes(8, "big")


class Event(msgspec.Struct, array_like=True, tag=True):
    """vLLM writes an event as an array with its type in front."""


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(Batch)


def free_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


class Router:
    """Knows by hash what the host has cached."""

    def __init__(self, events, replay):
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.connect(events)
        self.events.subscribe(b"kv@")
        self.replay_address = replay
        self.blocks, self.next = {}, 0
        self.catch_up()

    def catch_up(self):
        """Reads the batches that were published before the subscription."""
        for number, payload in self.replay(0):
            self.take(number, payload)

    def replay(self, start):
        asking = self.context.socket(zmq.REQ)
        asking.connect(self.replay_address)
        asking.setsockopt(zmq.RCVTIMEO, WATCHDOG_S * 1000)
        asking.send(start.to_bytes(8, "big"))
        # A REQ socket takes one answer, as vLLM's example does, so a DEALER reads them all.
        first = asking.recv_multipart()
        asking.close()
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVTIMEO, WATCHDOG_S * 1000)
        dealer.connect(self.replay_address)
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        batches = []
        while (frames := dealer.recv_multipart()[1:])[0] != END:
            batches.append((int.from_bytes(frames[0], "big"), frames[1]))
        dealer.close()
        assert not batches or [first[0], first[1]] == [batches[0][0].to_bytes(8, "big"), batches[0][1]]
        return batches

    def take(self, number, payload):
        if number < self.next:
            return []
        assert number == self.next, "no batch is missing"
        self.next = number + 1
        batch = DECODER.decode(payload)
        for event in batch.events:
            match event:
                case BlockStored():
                    assert event.block_size == BLOCK_TOKENS
                    assert len(event.token_ids) == BLOCK_TOKENS * len(event.block_hashes)
                    parent = event.parent_block_hash
                    for index, block in enumerate(event.block_hashes):
                        assert parent is None or parent in self.blocks
                        tokens = event.token_ids[index * BLOCK_TOKENS :][:BLOCK_TOKENS]
                        self.blocks[block] = (parent, tokens, event.lora_name)
                        parent = block
                case BlockRemoved():
                    for block in event.block_hashes:
                        del self.blocks[block]
                case AllBlocksCleared():
                    self.blocks.clear()
        return batch.events

    def until(self, is_so):
        end = time.monotonic() + WATCHDOG_S
        while not is_so(self):
            assert time.monotonic() < end and self.events.poll(WATCHDOG_S * 1000), "the events come"
            topic, number, payload = self.events.recv_multipart()
            assert topic == TOPIC
            self.take(int.from_bytes(number, "big"), payload)

    def longest_prefix(self, tokens, lora_name=None):
        """The number of leading tokens that the host has, as a router finds it."""
        parent, length = None, 0
        while True:
            block = tokens[length : length + BLOCK_TOKENS]
            found = [hash for hash, known in self.blocks.items() if known == (parent, block, lora_name)]
            if len(block) < BLOCK_TOKENS or not found:
                return length
            (parent,), length = found, length + BLOCK_TOKENS


@pytest.fixture(scope="module")
def addresses():
    return free_address(), free_address()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, addresses):
    events, replay = addresses
    running = Deployment(
        tmp_path_factory.mktemp("events"),
        ADAPTER_ROOT=EXAMPLES,
        MAX_CRASHES_PER_MIN=100,
        KV_EVENTS_ENDPOINT=events,
        KV_EVENTS_REPLAY_ENDPOINT=replay,
        KV_EVENTS_TOPIC=TOPIC.decode(),
    )
    yield running
    running.stop()


@pytest.fixture
def router(deployment, addresses):
    router = Router(*addresses)
    yield router
    router.context.destroy(linger=0)


def complete(deployment, tenant, model):
    """Computes TEXT; returns its tokens."""
    client = deployment.client(tenant, max_retries=20)
    client.completions.create(model=model, prompt=TEXT, max_tokens=1, temperature=0)
    headers = {"Authorization": f"Bearer {deployment.keys[tenant]}"}
    answer = httpx2.post(f"{deployment.url}/tokenize", json={"model": model, "prompt": TEXT}, headers=headers)
    return answer.json()["tokens"]


def whole(tokens):
    return len(tokens) - len(tokens) % BLOCK_TOKENS


def test_a_router_learns_which_prefixes_the_host_has_for_the_base_and_for_an_adapter(deployment, router):
    tokens = complete(deployment, "alice", BASE)
    router.until(lambda router: router.longest_prefix(tokens) == whole(tokens))
    assert router.longest_prefix(tokens, "haiku") == 0
    deployment.load("haiku", "haiku")
    adapted = complete(deployment, "alice", "haiku")
    router.until(lambda router: router.longest_prefix(adapted, "haiku") == whole(adapted))
    known = dict(router.blocks)
    # Another tenant computes the prefix again, which the host has already.
    complete(deployment, "bob", BASE)
    deployment.client("ops").post("/unload_lora_adapter", body={"lora_name": "haiku"}, cast_to=object)
    router.until(lambda router: router.longest_prefix(adapted, "haiku") == 0)
    assert router.blocks == {hash: block for hash, block in known.items() if block[2] is None}


def test_a_late_router_catches_up_and_a_lost_executor_loses_its_prefixes(deployment, router):
    tokens = complete(deployment, "alice", BASE)
    assert router.longest_prefix(tokens) == whole(tokens), "the replay has it"
    deployment.kill_executor()
    router.until(lambda router: not router.blocks)
    complete(deployment, "alice", BASE)
    router.until(lambda router: router.longest_prefix(tokens) == whole(tokens))

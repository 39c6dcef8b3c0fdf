"""Messages on a socket: what is sent arrives, and nothing damaged is ever used."""

import fcntl
import json
import resource
import select
import socket
import struct
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from autotune.data.facts import WorkloadFacts, WorkloadReference
from autotune.data.models import Frozen
from autotune.data.record import Boundary, Outcome, Slice, StepSeconds
from autotune.runtime import protocol
from autotune.runtime.protocol import Channel, ChannelClosed, ProtocolError

FACTS = WorkloadFacts(
    name="digits",
    batch_size=32,
    baseline={"prefetch": "autotune", "jit_compile": True, "data_threads": 1},
    batched=False,
    drop_remainder=True,
    takes_config=True,
    validates=False,
    fingerprint="sha256:00",
)
SLICE = Slice(
    seconds=0.51,
    steps=90,
    examples=2874,
    epochs=2,
    cpu_seconds=0.98,
    step_seconds=StepSeconds(p50=0.005, p90=0.006, p99=0.02, max=0.03),
    loss=0.25,
)
BOUNDARY = Boundary(seconds=0.125, validation_seconds=0.25, seconds_per_example=0.001, tail_excluded=True)
TIMING = protocol.TrialTiming(epoch_seconds=1.0, warmup_seconds=1.5)
EVERY_MESSAGE = [
    protocol.TrialRequest(
        configuration={"batch_size": 1, "jit_compile": True, "prefetch": "autotune"},
        log="/tmp/größe.txt",
        data=protocol.Data(examples=1437, endless=False),
        timing=protocol.TrialTiming(epoch_seconds=1.0, warmup_seconds=0.1, boundary=BOUNDARY),
    ),
    protocol.TrialRequest(
        configuration={"batch_size": 1},
        log="/tmp/log.txt",
        timing=TIMING,
        losses=protocol.LossRuns(
            folder="/tmp/batches", recorded_batch_size=1, seeds=(0, 7), most_steps=200, seconds=1.5
        ),
    ),
    protocol.LossCurves(curves=((2.5, 1.25, None), (2.0, 1.0, 0.5)), gpus=("NVIDIA H200",)),
    protocol.LossCurves(curves=(), gpus=()),
    protocol.TemplateReady(workload=FACTS, started="cuda"),
    protocol.TemplateReady(workload=None),
    protocol.Surveying(text="call 2 of fit() in train.py, line 12"),
    protocol.Forked(pid=4711),
    protocol.Exited(pid=4711, status=0),
    protocol.Exited(pid=4711, status=-9),
    protocol.Measure(seconds=0.1),
    protocol.Finish(input_wait_seconds=1.5),
    protocol.Started(
        jit_compile=False,
        examples=None,
        examples_per_epoch=None,
        endless=True,
        element="(TensorSpec…)",
        gpus=("NVIDIA H200",),
        device_limit_bytes=150_000_000_000,
        build={"cuda_version": "12.5"},
        in_force={"persistent_iterator": False, "prefetch": 1},
    ),
    protocol.FirstStep(loss=None, parameters=85002),
    protocol.Ready(
        timed_by="epochs",
        settled=True,
        warmup_seconds=1.25,
        compile_seconds=0.0,
        epoch_overhead_seconds=None,
        call_seconds=0.0078125,
        epoch_seconds=0.5,
    ),
    protocol.Ready(
        timed_by="steps",
        settled=False,
        warmup_seconds=3.0,
        compile_seconds=2.5,
        epoch_overhead_seconds=0.375,
        call_seconds=1.5,
        epoch_seconds=None,
        boundary=BOUNDARY,
    ),
    protocol.SliceDone(slice=SLICE),
    protocol.Finished(peak_host_bytes=1 << 40, peak_device_bytes=None, input_wait_fraction=0.5),
    protocol.Failed(outcome=Outcome.OOM, reason="too large", input_error=True),
]


@pytest.fixture
def pair():
    """Two connected stream sockets."""
    near, far = socket.socketpair()
    yield near, far
    near.close()
    far.close()


def frame(body):
    """`body` with its length in front."""
    return struct.pack(">i", len(body)) + body


def encoded(message):
    """The bytes in which `message` travels."""
    return frame(message.model_dump_json().encode())


# --------------------------------------------------------------------------------------------- what arrives


@pytest.mark.parametrize("message", EVERY_MESSAGE, ids=[type(message).__name__ for message in EVERY_MESSAGE])
def test_every_message_arrives_as_it_was_sent(pair, message):
    Channel(pair[0]).send(message)
    received = Channel(pair[1]).receive(timeout_seconds=0)
    assert received == message
    assert type(received) is type(message)
    assert received.model_dump_json() == message.model_dump_json()


def test_every_kind_of_message_is_tried_here():
    kinds = TypeAdapter(protocol.Message).json_schema()["discriminator"]["mapping"]
    assert set(kinds) == {message.kind for message in EVERY_MESSAGE}


def test_messages_in_one_write_arrive_singly_and_in_order(pair):
    sent = [protocol.Measure(seconds=1), protocol.Finish(), protocol.Measure(seconds=2)]
    pair[0].sendall(b"".join(map(encoded, sent)))
    channel = Channel(pair[1])
    received = []
    while select.select([channel], [], [], 0)[0]:
        received.append(channel.receive(timeout_seconds=0))
    assert received == sent


def test_a_message_that_comes_byte_by_byte_is_put_together(pair):
    message = protocol.Measure(seconds=0.75)
    slow = threading.Thread(target=lambda: [pair[0].send(bytes([each])) for each in encoded(message)])
    slow.start()
    assert Channel(pair[1]).receive(timeout_seconds=10) == message
    slow.join()


def test_a_message_that_never_ends_is_not_waited_for(pair, monkeypatch):
    monkeypatch.setattr(protocol, "REST_SECONDS", 1)
    channel = Channel(pair[1])
    pair[0].sendall(encoded(protocol.Finish())[:-1])
    with pytest.raises(ProtocolError, match="damaged"):
        channel.receive(timeout_seconds=0)


def test_a_message_larger_than_the_sockets_buffer_arrives(pair):
    message = protocol.Failed(outcome=Outcome.ERROR, reason="x" * (protocol.LARGEST_MESSAGE_BYTES // 2))
    sender = threading.Thread(target=Channel(pair[0]).send, args=(message,))
    sender.start()
    assert Channel(pair[1]).receive() == message
    sender.join()


def test_nothing_sent_is_a_timeout(pair):
    channel = Channel(pair[1])
    with pytest.raises(TimeoutError):
        channel.receive(timeout_seconds=0)
    Channel(pair[0]).send(protocol.Finish())
    assert channel.receive(timeout_seconds=0) == protocol.Finish()


def test_a_process_with_very_many_files_open_is_heard(pair):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    try:
        high = fcntl.fcntl(pair[1].fileno(), fcntl.F_DUPFD_CLOEXEC, 1500)
        channel = Channel(socket.socket(fileno=high))
        with pytest.raises(TimeoutError):
            channel.receive(timeout_seconds=0)
        Channel(pair[0]).send(protocol.Finish())
        assert channel.receive(timeout_seconds=10) == protocol.Finish()
        channel.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_message_cannot_be_changed():
    with pytest.raises(ValidationError):
        protocol.Measure(seconds=1.0).seconds = 2.0


def test_the_end_of_a_socket_arrives_after_its_message(pair):
    near, far = socket.socketpair()
    sender, receiver = Channel(pair[0]), Channel(pair[1])
    sender.send(protocol.Forked(pid=7), far)
    sender.send(protocol.Finish())
    far.close()
    assert receiver.receive(timeout_seconds=0) == protocol.Forked(pid=7)
    with receiver.receive_end() as end, near:
        assert receiver.receive(timeout_seconds=0) == protocol.Finish()
        end.sendall(b"hello")
        assert near.recv(5) == b"hello"


@pytest.mark.parametrize(
    ("place", "shown"),
    [({"file": "/home/me/train.py"}, "/home/me/train.py:workload"), ({"module": "a.b", "name": "w"}, "a.b:w")],
)
def test_a_workloads_reference_reads_as_the_user_writes_it(place, shown):
    assert str(WorkloadReference(**place)) == shown


# --------------------------------------------------------------------------------------------- what does not


@pytest.mark.parametrize("pid", [0, -1, 1 << 31])
def test_a_process_is_none_of_the_numbers_that_mean_many(pair, pid):
    pair[0].sendall(frame(json.dumps({"kind": "forked", "pid": pid}).encode()))
    with pytest.raises(ProtocolError):
        Channel(pair[1]).receive(timeout_seconds=0)


def test_what_was_wrong_is_said_in_one_line_whatever_came(pair):
    kind = "\x1b[2J\n" * 1000
    pair[0].sendall(frame(json.dumps({"kind": kind}).encode()))
    with pytest.raises(ProtocolError) as caught:
        Channel(pair[1]).receive(timeout_seconds=0)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= 1000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"{}",
        b'{"seconds": 1}',
        b'{"kind": "measure"}',
        b'{"kind": "measur", "seconds": 1}',
        b'{"kind": "measure", "seconds": 1, "more": 2}',
        b'{"kind": "measure", "seconds": "soon"}',
        b'{"kind": "measure", "seconds": NaN}',
        b'{"kind": "measure", "seconds": Infinity}',
        b'{"kind": "measure", "seconds": 1} {"kind": "finish"}',
        b'{"kind": "trial", "configuration": {"prefetch": 1.5}, "log": "/l"}',
        b'{"kind": "trial", "configuration": {"prefetch": null}, "log": "/l"}',
        b'{"kind": "trial", "configuration": {"prefetch": [1]}, "log": "/l"}',
        b"[" * 100_000,
        b'{"kind": "measure", "seconds": ' + b"9" * 5000 + b"}",
    ],
    ids=range(19),
)
def test_a_frame_that_holds_no_message_is_refused(pair, body):
    pair[0].sendall(frame(body) + encoded(protocol.Finish()))
    channel = Channel(pair[1])
    with pytest.raises(ProtocolError, match="not a message: "):
        channel.receive(timeout_seconds=0)
    assert channel.receive(timeout_seconds=0) == protocol.Finish()


def test_a_length_beyond_the_limit_is_refused_at_once(pair):
    pair[0].sendall(struct.pack(">i", protocol.LARGEST_MESSAGE_BYTES + 1))
    began = time.monotonic()
    with pytest.raises(ProtocolError, match="bad message length"):
        Channel(pair[1]).receive(timeout_seconds=0)
    assert time.monotonic() - began < protocol.REST_SECONDS


@pytest.mark.parametrize("kept", [1, 3, 5, -1])
def test_a_message_cut_short_is_refused(pair, kept):
    pair[0].sendall(encoded(protocol.Finish())[:kept])
    pair[0].close()
    with pytest.raises(ProtocolError, match="got end of file during message"):
        Channel(pair[1]).receive()


def test_a_closed_end_is_seen_after_the_last_message(pair):
    sender = Channel(pair[0])
    sender.send(protocol.Finish())
    sender.close()
    channel = Channel(pair[1])
    assert channel.receive() == protocol.Finish()
    for _ in range(2):
        with pytest.raises(ChannelClosed):
            channel.receive()
    with pytest.raises(ChannelClosed):
        channel.receive_end()


def test_sending_to_a_closed_end_says_so(pair):
    pair[1].close()
    with pytest.raises(ChannelClosed):
        Channel(pair[0]).send(protocol.Finish())


def test_a_reset_connection_is_a_closed_one(pair):
    pair[0].sendall(b"unread")
    pair[1].close()
    with pytest.raises(ChannelClosed):
        Channel(pair[0]).receive()


# ---------------------------------------------------------------------------------------------- properties


def everything_received(data):
    """What a channel makes of `data`, after which its sender closes: messages, and the exception at the end."""
    near, far = socket.socketpair()
    channel, received = Channel(far), []
    with near:
        near.sendall(data)
    try:
        while True:
            received.append(channel.receive())
    except (ProtocolError, ChannelClosed) as error:
        return received, error
    finally:
        channel.close()


@settings(deadline=None)
@given(
    sent=st.lists(st.sampled_from(EVERY_MESSAGE)),
    rest=st.one_of(
        st.just(b""),
        st.binary(max_size=64),
        st.binary(max_size=40).map(frame),
        st.sampled_from(EVERY_MESSAGE).map(lambda message: encoded(message)[:-1]),
    ),
)
def test_any_bytes_decode_to_messages_or_a_channel_error(sent, rest):
    received, end = everything_received(b"".join(map(encoded, sent)) + rest)
    assert received == sent
    assert isinstance(end, (ProtocolError, ChannelClosed) if rest else ChannelClosed)  # cut in a frame: closed


@settings(deadline=None)
@given(place=st.integers(0, 10_000), byte=st.integers(0, 255), message=st.sampled_from(EVERY_MESSAGE))
def test_one_damaged_byte_gives_a_message_or_one_of_two_errors(place, byte, message):
    whole = bytearray(encoded(message))
    whole[place % len(whole)] = byte
    received, _ = everything_received(bytes(whole))
    assert len(received) <= 1
    assert all(isinstance(message, Frozen) for message in received)

"""Framed messages on a socket: what is sent arrives, and nothing damaged is ever used."""

import fcntl
import json
import os
import resource
import select
import socket
import struct
import threading
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from autotune.record import Boundary, Outcome, Slice, StepSeconds
from autotune.worker import messages
from autotune.worker.messages import Channel, ChannelClosed, ProtocolError
from autotune.workloads.workload import WorkloadFacts, WorkloadReference

FACTS = WorkloadFacts(
    name="digits",
    batch_size=32,
    baseline={"prefetch": "autotune", "jit_compile": True, "data_threads": 1},
    batched=False,
    drop_remainder=True,
    dataset_takes_config=True,
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
EVERY_MESSAGE = [
    (
        messages.to_template,
        messages.TrialRequest(
            configuration={"batch_size": 1, "jit_compile": True, "prefetch": "autotune"},
            log="/tmp/größe.txt",
            examine=False,
            examples=1437,
            warmup_seconds=0.1,
            boundary=BOUNDARY,
        ),
    ),
    (
        messages.to_template,
        messages.TrialRequest(
            configuration={"batch_size": 1},
            log="/tmp/log.txt",
            losses=messages.LossRuns(
                folder="/tmp/batches",
                recorded_batch_size=1,
                scales=(1.0, 2.5),
                seeds=(0, 7),
                most_steps=200,
                seconds=1.5,
            ),
        ),
    ),
    (messages.to_template, messages.Sweep(pid=4711)),
    (
        messages.from_trial,
        messages.LossCurves(curves=((2.5, 1.25, None), (2.0, 1.0, 0.5)), gpus=("NVIDIA H200",)),
    ),
    (messages.from_trial, messages.LossCurves(curves=(), gpus=())),
    (messages.from_template, messages.TemplateReady(workload=FACTS, started="cuda")),
    (messages.from_template, messages.TemplateReady(workload=None)),
    (messages.from_template, messages.TemplateFailed(message="no", hint="mend", detail="a\nb", users=False)),
    (messages.from_template, messages.Forked(pid=4711)),
    (messages.from_template, messages.Exited(pid=4711, code=0)),
    (messages.from_template, messages.Exited(pid=4711, signal=9)),
    (messages.to_trial, messages.Measure(seconds=0.1)),
    (messages.to_trial, messages.Finish(input_wait_seconds=1.5)),
    (
        messages.from_trial,
        messages.Started(
            jit_compile=False,
            examples=None,
            examples_per_epoch=None,
            endless=True,
            element="(TensorSpec…)",
            parameters=85002,
            gpus=("NVIDIA H200",),
            device_limit_bytes=150_000_000_000,
            build={"cuda_version": "12.5"},
            in_force={"persistent_iterator": False, "prefetch": 1},
        ),
    ),
    (messages.from_trial, messages.FirstStep(at=1e9 + 0.123456789, loss=None)),
    (
        messages.from_trial,
        messages.Ready(
            timed_by="epochs",
            settled=True,
            warmup_seconds=1.25,
            compile_seconds=0.0,
            epoch_overhead_seconds=None,
            call_seconds=0.0078125,
            epoch_seconds=0.5,
        ),
    ),
    (
        messages.from_trial,
        messages.Ready(
            timed_by="steps",
            settled=False,
            warmup_seconds=3.0,
            compile_seconds=2.5,
            epoch_overhead_seconds=0.375,
            call_seconds=1.5,
            epoch_seconds=None,
            boundary=BOUNDARY,
        ),
    ),
    (messages.from_trial, messages.SliceDone(slice=SLICE)),
    (
        messages.from_trial,
        messages.Finished(peak_host_bytes=1 << 40, peak_device_bytes=None, input_wait_fraction=0.5),
    ),
    (messages.from_trial, messages.Failed(outcome=Outcome.OOM, reason="too large", input_error=True)),
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
    return struct.pack(">I", len(body)) + body


def encoded(message):
    """The bytes in which `message` travels."""
    return frame(message.model_dump_json().encode())


def open_descriptors():
    """The descriptors that this process has open."""
    return set(os.listdir("/proc/self/fd"))


# --------------------------------------------------------------------------------------------- what arrives


@pytest.mark.parametrize(
    ("expected", "message"), EVERY_MESSAGE, ids=[type(each).__name__ for _, each in EVERY_MESSAGE]
)
def test_every_message_arrives_as_it_was_sent(pair, expected, message):
    """Type, values and the types of the values are the same at the other end."""
    Channel(pair[0], expected).send(message)
    received = Channel(pair[1], expected).receive(timeout_seconds=0)
    assert received == message
    assert type(received) is type(message)
    assert received.model_dump_json() == message.model_dump_json()


def test_every_kind_of_message_is_tried_here():
    """A message added to a channel must be added to the list above."""
    adapters = [messages.to_template, messages.from_template, messages.to_trial, messages.from_trial]
    kinds = {kind for adapter in adapters for kind in adapter.json_schema()["discriminator"]["mapping"]}
    assert kinds == {message.kind for _, message in EVERY_MESSAGE}


def test_true_and_one_stay_apart_in_a_configuration(pair):
    """A knob's boolean does not arrive as a number, nor a number as a boolean."""
    request = messages.TrialRequest(configuration={"jit_compile": True, "steps_per_execution": 1}, log="/l")
    Channel(pair[0], messages.from_template).send(request)
    received = Channel(pair[1], messages.to_template).receive(timeout_seconds=0)
    assert received.configuration["jit_compile"] is True
    assert received.configuration["steps_per_execution"] is not True


def test_messages_sent_in_one_write_arrive_one_by_one_and_in_order(pair):
    """Frames that the socket has joined are taken apart."""
    sent = [messages.Measure(seconds=1), messages.Finish(), messages.Measure(seconds=2)]
    pair[0].sendall(b"".join(map(encoded, sent)))
    channel = Channel(pair[1], messages.to_trial)
    assert [channel.receive(timeout_seconds=0) for _ in sent] == sent
    with pytest.raises(TimeoutError):
        channel.receive(timeout_seconds=0)


def test_select_sees_every_message_that_was_not_received_yet(pair):
    """A channel hides nothing in a buffer: a reader that waits with `select` before each message gets all."""
    pair[0].sendall(encoded(messages.Sweep(pid=1)) + encoded(messages.Sweep(pid=2)))
    channel = Channel(pair[1], messages.to_template)
    pids = []
    while select.select([channel], [], [], 0)[0]:
        pids.append(channel.receive().pid)
    assert pids == [1, 2]


def test_a_message_that_comes_byte_by_byte_is_put_together(pair):
    """Until the last byte nothing is received, and nothing of it is lost."""
    message = messages.Measure(seconds=0.75)
    channel = Channel(pair[1], messages.to_trial)
    whole = encoded(message)
    for byte in whole[:-1]:
        pair[0].send(bytes([byte]))
        with pytest.raises(TimeoutError):
            channel.receive(timeout_seconds=0)
    pair[0].send(whole[-1:])
    assert channel.receive(timeout_seconds=0) == message


def test_an_empty_frame_whose_head_comes_in_two_pieces_takes_nothing_of_the_next(pair):
    """A head is read to its end and no further, even when most of it was there before."""
    channel = Channel(pair[1], messages.to_trial)
    pair[0].send(frame(b"")[:3])
    with pytest.raises(TimeoutError):
        channel.receive(timeout_seconds=0)
    pair[0].send(frame(b"")[3:] + encoded(messages.Finish()))
    with pytest.raises(ProtocolError):
        channel.receive(timeout_seconds=0)
    assert channel.receive(timeout_seconds=0) == messages.Finish()


def test_a_message_larger_than_the_sockets_buffer_arrives(pair):
    """The sender waits for the reader; the reader takes it in pieces."""
    message = messages.TemplateFailed(message="x" * (messages.LARGEST_MESSAGE_BYTES // 2))
    sender = threading.Thread(target=Channel(pair[0], messages.to_template).send, args=(message,))
    sender.start()
    assert Channel(pair[1], messages.from_template).receive() == message
    sender.join()


def test_nothing_sent_is_a_timeout(pair):
    """Waiting ends when the time is up, and the channel stays usable."""
    channel = Channel(pair[1], messages.to_trial)
    with pytest.raises(TimeoutError):
        channel.receive(timeout_seconds=0)
    Channel(pair[0], messages.from_trial).send(messages.Finish())
    assert channel.receive(timeout_seconds=0) == messages.Finish()


def test_waiting_is_shared_by_all_the_pieces_of_a_message(pair, monkeypatch):
    """Each piece is waited for as long as is left of the time; without a time, for ever."""
    waited = []

    def wait(milliseconds):
        waited.append(milliseconds)
        pair[0].send(b"\0")
        return [(pair[1].fileno(), 1)]

    def poll():
        return SimpleNamespace(register=lambda *_: None, poll=wait)

    times = iter([100.0, 101.0, 103.0, 109.0])
    monkeypatch.setattr(messages, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(messages, "select", SimpleNamespace(poll=poll, POLLIN=1))
    channel = Channel(pair[1], messages.to_trial)
    with pytest.raises(StopIteration):
        channel.receive(timeout_seconds=5)
    assert waited == [4000.0, 2000.0, 0.0]
    with pytest.raises(ProtocolError):
        channel.receive()
    assert waited[3:] == [None]


def test_a_process_with_very_many_files_open_is_heard(pair):
    """Above descriptor 1,023, where `select` ends: a workload may hold more files open than that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    try:
        high = fcntl.fcntl(pair[1].fileno(), fcntl.F_DUPFD_CLOEXEC, 1500)
        with socket.socket(fileno=high) as there:
            channel = Channel(there, messages.to_trial)
            with pytest.raises(TimeoutError):
                channel.receive(timeout_seconds=0)
            Channel(pair[0], messages.from_trial).send(messages.Finish())
            assert channel.receive(timeout_seconds=10) == messages.Finish()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_message_cannot_be_changed():
    """What was received is what was sent, for as long as it is kept."""
    with pytest.raises(ValidationError):
        messages.Measure(seconds=1.0).seconds = 2.0


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ({"file": "/home/me/train.py"}, "/home/me/train.py:workload"),
        ({"module": "a.b", "name": "w"}, "a.b:w"),
    ],
)
def test_a_workloads_reference_reads_as_the_user_writes_it(place, shown):
    """File or module, a colon, and the name."""
    assert str(WorkloadReference(**place)) == shown


# ---------------------------------------------------------------------------------------------- descriptors


def test_a_descriptor_arrives_with_its_message(pair):
    """What the sender opened can be used by the receiver, and is not handed on to programs it starts."""
    reading, writing = os.pipe()
    Channel(pair[0], messages.from_template).send(messages.Sweep(pid=1), (writing,))
    os.close(writing)
    message, descriptors = Channel(pair[1], messages.to_template).receive_with_descriptors(0)
    assert message == messages.Sweep(pid=1)
    assert os.get_inheritable(descriptors[0]) is False
    os.write(descriptors[0], b"hello")
    assert os.read(reading, 5) == b"hello"
    for descriptor in (reading, *descriptors):
        os.close(descriptor)


def test_a_descriptor_stays_with_its_message_when_another_goes_before(pair):
    """The message in front gets none, even where both wait in the socket."""
    sender, receiver = Channel(pair[0], messages.from_template), Channel(pair[1], messages.to_template)
    sender.send(messages.Sweep(pid=1))
    sender.send(messages.Sweep(pid=2), (pair[0].fileno(),))
    sender.send(messages.Sweep(pid=3))
    received = [receiver.receive_with_descriptors(0) for _ in range(3)]
    assert [(message.pid, len(descriptors)) for message, descriptors in received] == [(1, 0), (2, 1), (3, 0)]
    os.close(received[1][1][0])


def test_a_descriptor_outlasts_a_timeout(pair):
    """A descriptor that came with the head of a message is there when the rest has come."""
    whole = encoded(messages.Sweep(pid=1))
    channel = Channel(pair[1], messages.to_template)
    socket.send_fds(pair[0], [whole[:4]], [pair[0].fileno()])
    with pytest.raises(TimeoutError):
        channel.receive_with_descriptors(0)
    pair[0].sendall(whole[4:])
    _, descriptors = channel.receive_with_descriptors(0)
    assert len(descriptors) == 1
    os.close(descriptors[0])


def test_descriptors_that_nobody_asked_for_are_closed(pair):
    """Neither a message received without them nor a refused one leaves any open."""
    before = open_descriptors()
    channel = Channel(pair[1], messages.to_template)
    Channel(pair[0], messages.from_template).send(messages.Sweep(pid=1), (pair[0].fileno(),))
    channel.receive(timeout_seconds=0)
    Channel(pair[0], messages.from_template).send(messages.Finish(), (pair[0].fileno(),))
    with pytest.raises(ProtocolError):
        channel.receive_with_descriptors(0)
    assert open_descriptors() == before


def test_a_descriptor_of_a_message_that_was_never_whole_is_closed(pair):
    """Closing the channel leaves none open."""
    before = open_descriptors()
    channel = Channel(pair[1], messages.to_template)
    socket.send_fds(pair[0], [encoded(messages.Sweep(pid=1))[:4]], [pair[0].fileno()])
    with pytest.raises(TimeoutError):
        channel.receive(timeout_seconds=0)
    channel.close()
    assert len(open_descriptors()) == len(before) - 1  # its own


# --------------------------------------------------------------------------------------------- what does not


@pytest.mark.parametrize("pid", [0, -1, 1 << 31])
def test_a_process_is_none_of_the_numbers_that_mean_many(pair, pid):
    """To `kill`, zero is one's own group and minus one is everything."""
    pair[0].sendall(frame(json.dumps({"kind": "forked", "pid": pid}).encode()))
    with pytest.raises(ProtocolError):
        Channel(pair[1], messages.from_template).receive(timeout_seconds=0)


def test_what_was_wrong_is_said_in_one_line_whatever_came(pair):
    """The kind of a message that does not exist, however long and whatever is in it."""
    kind = "\x1b[2J\n" * 1000
    pair[0].sendall(frame(json.dumps({"kind": kind}).encode()))
    with pytest.raises(ProtocolError) as caught:
        Channel(pair[1], messages.from_template).receive(timeout_seconds=0)
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
        b'{"kind": "sweep", "pid": 1}',
        b"[" * 100_000,
        b'{"kind": "measure", "seconds": ' + b"9" * 5000 + b"}",
    ],
    ids=range(17),
)
def test_a_frame_that_holds_no_expected_message_is_refused(pair, body):
    """Damaged JSON, unknown kinds, missing and additional fields, numbers that are none, others' messages."""
    pair[0].sendall(frame(body) + encoded(messages.Finish()))
    channel = Channel(pair[1], messages.to_trial)
    with pytest.raises(ProtocolError, match="not a message: "):
        channel.receive(timeout_seconds=0)
    assert channel.receive(timeout_seconds=0) == messages.Finish()


@pytest.mark.parametrize("value", [1.5, None, [1], {}])
def test_a_configuration_holds_booleans_integers_and_text_only(pair, value):
    """A request whose knob has a value of another type is refused."""
    pair[0].sendall(
        frame(json.dumps({"kind": "trial", "configuration": {"prefetch": value}, "log": "/l"}).encode())
    )
    channel = Channel(pair[1], messages.to_template)
    with pytest.raises(ProtocolError):
        channel.receive(timeout_seconds=0)


@pytest.mark.parametrize("length", [messages.LARGEST_MESSAGE_BYTES + 1, 0xFFFFFFFF])
def test_a_length_beyond_the_limit_is_refused_at_once(pair, length):
    """Nothing of such a message is waited for."""
    pair[0].sendall(struct.pack(">I", length))
    with pytest.raises(ProtocolError, match=f"a message of {length} bytes, at most 4194304 expected"):
        Channel(pair[1], messages.to_trial).receive(timeout_seconds=0)


def test_a_length_at_the_limit_is_waited_for(pair):
    """The largest allowed message is not refused by its length."""
    pair[0].sendall(struct.pack(">I", messages.LARGEST_MESSAGE_BYTES))
    with pytest.raises(TimeoutError):
        Channel(pair[1], messages.to_trial).receive(timeout_seconds=0)


@pytest.mark.parametrize("kept", [1, 3, 4, 5, -1])
def test_a_message_cut_short_is_refused(pair, kept):
    """An end in the length, after it, or in the text, is not the same as a sender that is done."""
    pair[0].sendall(encoded(messages.Finish())[:kept])
    pair[0].close()
    with pytest.raises(ProtocolError, match="the last message was cut short"):
        Channel(pair[1], messages.to_trial).receive()


def test_a_closed_end_is_seen_after_the_last_message(pair):
    """What was sent before the end is received; then the channel is closed, however often one asks."""
    sender = Channel(pair[0], messages.from_trial)
    sender.send(messages.Finish())
    sender.close()
    channel = Channel(pair[1], messages.to_trial)
    assert channel.receive() == messages.Finish()
    for _ in range(2):
        with pytest.raises(ChannelClosed):
            channel.receive()


def test_receiving_from_an_end_closed_here_says_so(pair):
    """A channel that was closed on this side is closed, too."""
    channel = Channel(pair[1], messages.to_trial)
    channel.close()
    with pytest.raises(ChannelClosed):
        channel.receive()


@pytest.mark.parametrize("descriptors", [(), (0,)])
def test_sending_to_a_closed_end_says_so(pair, descriptors):
    """No signal, no plain OSError: the other end is gone."""
    pair[1].close()
    with pytest.raises(ChannelClosed):
        Channel(pair[0], messages.to_trial).send(messages.Finish(), descriptors)


def test_a_reset_connection_is_a_closed_one(pair):
    """An end that closes with unread data resets the connection: gone all the same."""
    pair[0].sendall(b"unread")
    pair[1].close()
    with pytest.raises(ChannelClosed):
        Channel(pair[0], messages.to_trial).receive()


# ---------------------------------------------------------------------------------------------- properties


def everything_received(data, chunks, expected):
    """What a channel makes of `data` sent in pieces and then closed: messages, and the exception at the end."""
    near, far = socket.socketpair()
    received = []
    with near, far:
        channel = Channel(far, expected)
        try:
            for index in range(0, len(data), chunks):
                near.sendall(data[index : index + chunks])
                try:
                    while True:
                        received.append(channel.receive(timeout_seconds=0))
                except TimeoutError:
                    pass
            near.close()
            while True:
                received.append(channel.receive(timeout_seconds=0))
        except (ProtocolError, ChannelClosed) as error:
            return received, error


def read_at_once(data, expected):
    """What a channel should make of all of `data`: the messages up to the first mistake, and how it ends."""
    read = []
    while len(data) >= 4:
        (length,) = struct.unpack_from(">I", data)
        if len(data) < 4 + length:
            break
        try:
            read.append(expected.validate_json(data[4 : 4 + length]))
        except ValidationError:
            return read, ProtocolError
        data = data[4 + length :]
    return read, ProtocolError if data else ChannelClosed


@settings(max_examples=200, deadline=None)
@given(
    sent=st.lists(
        st.sampled_from([message for expected, message in EVERY_MESSAGE if expected is messages.from_trial])
    ),
    chunks=st.integers(1, 400),
)
def test_however_the_bytes_are_cut_the_same_messages_arrive(sent, chunks):
    """Writes need not end where messages do."""
    received, end = everything_received(b"".join(map(encoded, sent)), chunks, messages.from_trial)
    assert received == sent
    assert isinstance(end, ChannelClosed)


@settings(max_examples=200, deadline=None)
@given(
    data=st.one_of(
        st.binary(max_size=64),
        st.lists(st.binary(max_size=40).map(frame), max_size=4).map(b"".join),
        st.tuples(
            st.sampled_from([encoded(message) for _, message in EVERY_MESSAGE]), st.binary(max_size=9)
        ).map(b"".join),
    ),
    chunks=st.integers(1, 80),
)
@example(data=b"\x00\x00\x00\x02{}", chunks=1)
def test_whatever_bytes_come_they_are_messages_or_one_of_two_errors(data, chunks):
    """No bytes raise anything but `ProtocolError` or `ChannelClosed`, nor pass as something else."""
    received, end = everything_received(data, chunks, messages.to_trial)
    wanted, wanted_end = read_at_once(data, messages.to_trial)
    assert received == wanted
    assert type(end) is wanted_end


@settings(max_examples=200, deadline=None)
@given(
    place=st.integers(0, 10_000),
    byte=st.integers(0, 255),
    message=st.sampled_from(
        [message for expected, message in EVERY_MESSAGE if expected is messages.from_trial]
    ),
)
def test_one_damaged_byte_gives_a_message_or_one_of_two_errors(place, byte, message):
    """Damage anywhere in a frame is noticed, or gives another valid message; it never raises anything else."""
    whole = bytearray(encoded(message))
    whole[place % len(whole)] = byte
    received, _ = everything_received(bytes(whole), len(whole), messages.from_trial)
    assert len(received) <= 1

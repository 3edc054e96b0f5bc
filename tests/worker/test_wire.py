"""The handshake and the frames, between two ends in one process on a real socket."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from server.errors import HandshakeRefused, PdctlError, PeerLost, ProtocolError
from server.messages import Card, Heartbeat, Hello, Load
from server.wire import MAX_FRAME, Channel, Identity, bind, connect, greet, serve, welcome

SECRET = b"one stack's"
CARD = Card({"dtype": "bfloat16", "tp": "1", "layers": "30"}, {"kv_host": "10.0.0.2"})
P, D = Identity.new("prefill-0", "prefill"), Identity.new("decode-0", "decode")


class Server:
    """D, listening: who got through the handshake, and why others did not."""

    def __init__(self, address: str, card: Card) -> None:
        self.address = address
        self.card = card
        self.ended: asyncio.Queue[Channel | PdctlError] = asyncio.Queue()
        self.done = asyncio.Event()

    async def handle(self, channel: Channel) -> None:
        try:
            await welcome(channel, D, SECRET, self.card, timeout_s=5.0)
        except PdctlError as error:
            self.ended.put_nowait(error)
            return
        self.ended.put_nowait(channel)
        await self.done.wait()

    async def end(self) -> Channel | PdctlError:
        async with asyncio.timeout(5):
            return await self.ended.get()


@asynccontextmanager
async def serving(where: str, card: Card = CARD) -> AsyncIterator[Server]:
    """`where`: "unix:PATH", or "tcp:HOST" on any free port."""
    sock = bind(where if where.startswith("unix:") else f"{where}:0")
    address = where if where.startswith("unix:") else f"{where}:{sock.getsockname()[1]}"
    server = Server(address, card)
    listener = await serve(sock, server.handle)
    try:
        yield server
    finally:
        server.done.set()
        listener.close()


@pytest.fixture
def where(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/d.sock"


@pytest.mark.parametrize("network", ["unix", "tcp"])
async def test_handshake(where: str, network: str) -> None:
    """Each side knows the other's identity and card; then messages cross."""
    async with serving(where if network == "unix" else "tcp:127.0.0.1") as server:
        channel = await connect(server.address)
        await greet(channel, P, SECRET, CARD)
        theirs = await server.end()
        assert isinstance(theirs, Channel)
        assert (channel.peer, theirs.peer) == (D, P)
        assert channel.card == theirs.card == CARD
        channel.send(Heartbeat(3))
        assert await theirs.recv(5.0) == Heartbeat(3)
        channel.abort()
        with pytest.raises(PeerLost, match="prefill-0 closed the connection"):
            await theirs.recv(5.0)


async def test_strangers_are_refused(where: str) -> None:
    """1. Who lacks the secret sees no card and does not get in. 2. Who answers without it is not told ours."""
    async with serving(where) as server:
        channel = await connect(server.address)
        with pytest.raises(HandshakeRefused, match="decode-0 does not know this stack's secret"):
            await greet(channel, P, b"another", CARD)
        channel.abort()
        assert isinstance(await server.end(), PeerLost)
        # 3. A proof that was heard from the server is no proof of the client's.
        channel = await connect(server.address)
        channel.send(Hello(P.name, P.role, P.instance, nonce=b"n" * 16))
        heard = await channel.recv(5.0)
        assert isinstance(heard, Hello)
        assert heard.card is None
        channel.send(Hello(P.name, P.role, P.instance, proof=heard.proof, card=CARD))
        assert isinstance(await server.end(), HandshakeRefused)
        with pytest.raises(PeerLost):
            await channel.recv(5.0)
        channel.abort()


async def test_cards_that_differ_are_refused_field_by_field(where: str) -> None:
    """Both sides are told, each with its own name first; what only one side knows is no difference."""
    theirs = Card({"dtype": "float32", "tp": "2", "rope": "x"})
    async with serving(where) as server:
        channel = await connect(server.address)
        with pytest.raises(HandshakeRefused) as refused:
            await greet(channel, P, SECRET, theirs)
        channel.abort()
        assert refused.value.message == (
            "model cards differ: dtype: decode-0 has bfloat16, prefill-0 has float32; "
            "tp: decode-0 has 1, prefill-0 has 2"
        )
        ours = await server.end()
        assert isinstance(ours, HandshakeRefused)
        assert ours.message == refused.value.message


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (struct.pack(">I", MAX_FRAME + 1), ProtocolError),
        (struct.pack(">I", 5) + b"hello", ProtocolError),
        (b"GET / HTTP/1.1\r\n\r\n", ProtocolError),
        (b"\0", PeerLost),
    ],
)
async def test_what_is_no_hello_ends_the_connection(where: str, data: bytes, kind: type[PdctlError]) -> None:
    async with serving(where) as server:
        _, writer = await asyncio.open_unix_connection(server.address.removeprefix("unix:"))
        writer.write(data)
        writer.write_eof()
        assert isinstance(await server.end(), kind)
        writer.close()
        # A message before the handshake is none either.
        channel = await connect(server.address)
        channel.send(Load(0, 0, 0, 0, 0, 0, 0, 0))
        assert isinstance(await server.end(), ProtocolError)
        channel.abort()


async def test_a_peer_that_does_not_read_is_cut_off(where: str) -> None:
    """The send buffer stands still for as long as the limit: the connection ends, and nobody waited for it."""
    async with serving(where) as server:
        _, channel = await asyncio.get_running_loop().create_unix_connection(
            lambda: Channel(send_timeout_s=0.05), server.address.removeprefix("unix:")
        )
        for _ in range(64):
            channel.send(Load(0, 0, 0, 0, 0, 0, 0, 0, integrity="x" * 2**17))
        async with asyncio.timeout(10):
            while not channel.is_closed:
                await asyncio.sleep(0.01)  # its own timer is what is waited for
        server.done.set()


async def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match="cannot connect to unix"):
        await connect(f"unix:{tmp_path}/nobody.sock")
    with pytest.raises(PeerLost, match="cannot connect to tcp:127.0.0.1:1"):
        await connect("tcp:127.0.0.1:1")

"""From logits to tokens, vectorised over the rows of a step.

Order, as in vLLM: allowed_token_ids, min_tokens, bad_words, logit_bias, penalties (repetition over prompt and output,
then frequency and presence over the output), temperature, min_p, top_k, top_p. Values tied with the last one that
top_k or top_p keeps are kept too. A grammar has the last word before temperature: where all the others together leave a
row none of the tokens it allows, it alone counts. Logprobs are of the model's own distribution, as OpenAI and vLLM
report them: log_softmax of the raw logits, before all of that.

A draw is the inverse of the cumulative distribution, in token order, at one number in [0, 1) that `uniform` derives
from (seed, output index). So a token depends on its logits and its own request only: not on the rest of the batch, the
process, or which worker draws it.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from server.device import arriving, on_device, on_host
from server.grammar import Grammars
from server.sequence import SamplingParams, Sequence, Stuck, Token

_MASK64 = (1 << 64) - 1
# top_p looks for its edge among this many most likely tokens first; a sort of the whole vocabulary costs milliseconds.
_HEAD = 1024
_NEVER = float("-inf")


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for output `index` of `seed`: two rounds of the splitmix64 finalizer, 53 bits."""
    return (_mix(_mix(seed & _MASK64) ^ (index * 0x9E3779B97F4A7C15 & _MASK64)) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


def is_plain_greedy(params: SamplingParams) -> bool:
    """Whether the token is simply the argmax of the raw logits, and nothing else is asked for."""
    return params.is_greedy and params.num_logprobs < 0 and not params.is_restrained


@dataclass(slots=True)
class Drawn:
    """A step's tokens: `ids` [rows] where the logits are, for a step that goes on from them; `tokens` waits."""

    ids: torch.Tensor
    tokens: Callable[[], Rows[Token | Stuck]]


class Sampler:
    """What a row needs is in its Sequence; `grammars` keeps what can be rebuilt from it."""

    def __init__(self, grammars: Grammars | None = None) -> None:
        self._grammars = grammars

    def sample(self, logits: torch.Tensor, seqs: Rows[Sequence]) -> Rows[Token | Stuck]:
        """[rows, vocab] logits of any float dtype, one row a sequence -> one Token each. `logits` is not changed."""
        return self.begin(logits, seqs, [len(s.output) for s in seqs]).tokens()

    def begin(self, logits: torch.Tensor, seqs: Rows[Sequence], indices: Rows[int]) -> Drawn:
        """`sample` of each sequence's output of that index. Where all are free (`SamplingParams.is_free`), the outputs
        before it need not be known, and nothing waits for the device before `tokens` is called."""
        if all(is_plain_greedy(s.params) for s in seqs):
            return _read(logits.argmax(-1))
        raw = logits.float()
        shaped = reshape(raw, seqs)
        if self._grammars is not None:
            shaped = bind(shaped, raw, seqs, self._grammars)
        chosen = shaped.argmax(-1)
        drawn = [i for i, s in enumerate(seqs) if not s.params.is_greedy]
        if drawn:
            at = _index(drawn, raw)  # a list as an index would wait for the device
            rows = shaped if len(drawn) == len(seqs) else shaped.index_select(0, at)
            chosen.index_copy_(0, at, draw(rows, [seqs[i] for i in drawn], [indices[i] for i in drawn]))
        if not any(s.params.grammar or s.params.num_logprobs >= 0 for s in seqs):
            return _read(chosen)
        tokens = with_logprobs(raw, chosen, [s.params.num_logprobs for s in seqs])
        found = [self._stuck(s) or t for s, t in zip(seqs, tokens, strict=True)]
        return Drawn(chosen, lambda: found)

    def _stuck(self, seq: Sequence) -> Stuck | None:
        why = self._grammars.failure(seq) if self._grammars is not None else ""
        return Stuck(f"the grammar cannot go on after {len(seq.output)} tokens: {why}") if why else None


def _read(chosen: torch.Tensor) -> Drawn:
    ids = arriving(chosen)
    return Drawn(chosen, lambda: [Token(i) for i in ids().tolist()])


# -- reshaping: constraints, bias, penalties --------------------------------------------------------------------------


def reshape(raw: torch.Tensor, seqs: Rows[Sequence]) -> torch.Tensor:
    """Everything that applies to greedy rows too. Returns `raw` itself where no row asks for anything."""
    if not any(s.params.is_restrained for s in seqs):
        return raw
    logits = raw.clone()
    vocab = logits.shape[1]
    _allow(logits, seqs)
    _put(logits, seqs, lambda s: [(t, _NEVER) for t in _unripe_stops(s)], accumulate=False)
    _put(logits, seqs, lambda s: [(t, _NEVER) for t in _bad_ends(s)], accumulate=False)
    _put(logits, seqs, lambda s: list(s.params.logit_bias.items()), accumulate=True)
    _repetition(logits, seqs)
    rows = [i for i, s in enumerate(seqs) if s.output and (s.params.frequency_penalty or s.params.presence_penalty)]
    if rows:
        counts = _counts([seqs[i].output for i in rows], vocab, logits.device)
        frequency = _column([seqs[i].params.frequency_penalty for i in rows], logits)
        presence = _column([seqs[i].params.presence_penalty for i in rows], logits)
        logits[rows] -= frequency * counts + presence * (counts > 0)
    return _unstuck(logits, raw, seqs)


def _unstuck(logits: torch.Tensor, raw: torch.Tensor, seqs: Rows[Sequence]) -> torch.Tensor:
    """Demands that leave a row no token at all (only a stop is allowed, and min_tokens forbids it) give way, but for
    allowed_token_ids."""
    stuck = (logits.amax(-1) == _NEVER).nonzero().flatten().tolist()
    if stuck:
        part = raw[stuck]
        _allow(part, [seqs[i] for i in stuck])
        logits[stuck] = part
    return logits


def _allow(logits: torch.Tensor, seqs: Rows[Sequence]) -> None:
    for i, s in enumerate(seqs):
        if s.params.allowed_token_ids:
            keep = _index((t for t in s.params.allowed_token_ids if 0 <= t < logits.shape[1]), logits)
            row = torch.full_like(logits[i], _NEVER)
            row[keep] = logits[i, keep]
            logits[i] = row


def _unripe_stops(seq: Sequence) -> tuple[int, ...]:
    return seq.params.stop_token_ids if len(seq.output) < seq.params.min_tokens else ()


def _bad_ends(seq: Sequence) -> list[int]:
    """Tokens that would complete a bad word."""
    output = seq.output
    return [
        word[-1]
        for word in seq.params.bad_words
        if len(word) <= len(output) + 1 and (len(word) == 1 or tuple(output[1 - len(word) :]) == word[:-1])
    ]


def _put(
    logits: torch.Tensor,
    seqs: Rows[Sequence],
    entries: Callable[[Sequence], list[tuple[int, float]]],
    accumulate: bool,
) -> None:
    """Sets or adds (token, value) entries of each row. Ids outside the vocabulary are left out: one bad request must
    not end the step for all."""
    vocab = logits.shape[1]
    found = [(i, t, v) for i, s in enumerate(seqs) for t, v in entries(s) if 0 <= t < vocab]
    if found:
        rows, tokens, values = zip(*found, strict=True)
        at = (_index(rows, logits), _index(tokens, logits))
        logits.index_put_(at, on_device(values, logits.dtype, logits.device), accumulate=accumulate)


def _repetition(logits: torch.Tensor, seqs: Rows[Sequence]) -> None:
    rows = [i for i, s in enumerate(seqs) if s.params.repetition_penalty != 1.0]
    if not rows:
        return
    seen = torch.zeros(len(rows), logits.shape[1], dtype=torch.bool, device=logits.device)
    for row, i in zip(seen, rows, strict=True):
        row[_index(seqs[i].prompt + seqs[i].output, logits)] = True
    penalty = _column([seqs[i].params.repetition_penalty for i in rows], logits)
    part = logits[rows]
    logits[rows] = torch.where(seen, torch.where(part > 0, part / penalty, part * penalty), part)


def _counts(tokens: list[list[int]], vocab: int, device: torch.device) -> torch.Tensor:
    """[rows, vocab]: how often each token stands in each list."""
    counts = torch.zeros(len(tokens), vocab, device=device)
    flat = on_device([i * vocab + t for i, row in enumerate(tokens) for t in row], torch.long, device)
    return counts.view(-1).scatter_add_(0, flat, torch.ones(flat.shape, device=device)).view(len(tokens), vocab)


def _column(values: Iterable[float], like: torch.Tensor) -> torch.Tensor:
    return on_device(list(values), torch.float32, like.device).unsqueeze(1)


def _index(values: Iterable[int], like: torch.Tensor) -> torch.Tensor:
    return on_device(list(values), torch.long, like.device)


def bind(shaped: torch.Tensor, raw: torch.Tensor, seqs: Rows[Sequence], grammars: Grammars) -> torch.Tensor:
    """Takes from each row with a grammar all tokens that the grammar does not allow there."""
    rows = [i for i, s in enumerate(seqs) if s.params.grammar]
    if not rows:
        return shaped
    # Packed as it comes, so that one small copy goes to the device; it is spread out there.
    packed = torch.frombuffer(bytearray(b"".join(grammars.mask(seqs[i]) for i in rows)), dtype=torch.uint8)
    packed = packed.view(len(rows), -1).to(raw.device)
    bits = torch.arange(8, dtype=torch.uint8, device=raw.device)
    forbidden = ((packed.unsqueeze(-1) >> bits) & 1).view(len(rows), -1)[:, : raw.shape[1]] == 0
    part = shaped[rows].masked_fill(forbidden, _NEVER)
    stuck = part.amax(-1, keepdim=True) == _NEVER
    bound = shaped.clone()
    bound[rows] = torch.where(stuck, raw[rows].masked_fill(forbidden, _NEVER), part)
    return bound


# -- drawing ----------------------------------------------------------------------------------------------------------


def draw(logits: torch.Tensor, seqs: Rows[Sequence], indices: Rows[int]) -> torch.Tensor:
    """One token a row, output `indices[row]` of its sequence, all with temperature above 0."""
    # So cold that it is greedy; colder would overflow.
    scaled = logits / _column((max(s.params.temperature, 1e-5) for s in seqs), logits)
    scaled = scaled.masked_fill(scaled < _edges(scaled, seqs), _NEVER)
    # float64: a float32 running sum over 150,000 tokens would move the edges between tokens by more than their width.
    cumulative = torch.softmax(scaled.double(), -1).cumsum(-1)
    numbers = [uniform(s.params.seed, index) for s, index in zip(seqs, indices, strict=True)]
    target = on_device(numbers, torch.float64, logits.device).unsqueeze(1) * cumulative[:, -1:]
    # right=True: the first token whose sum is above the target, so never one of probability 0. A product that rounds up
    # to the total itself would run off the end; it then means the last token that has a probability.
    last = (cumulative < cumulative[:, -1:]).sum(-1)
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).minimum(last)


def _edges(scaled: torch.Tensor, seqs: Rows[Sequence]) -> torch.Tensor:
    """[rows, 1]: the least logit that min_p, top_k and top_p keep in each row."""
    edge = torch.full((len(seqs), 1), _NEVER, device=scaled.device)
    params = [s.params for s in seqs]
    top = scaled.amax(-1, keepdim=True)
    if any(p.min_p > 0 for p in params):
        edge = torch.maximum(edge, top + torch.log(_column((p.min_p for p in params), scaled)))
    vocab = scaled.shape[1]
    top_ks = [p.top_k if 0 < p.top_k < vocab else 0 for p in params]
    nucleus = [i for i, p in enumerate(params) if p.top_p < 1.0]
    if not (nucleus or any(top_ks)):
        return edge
    width = min(vocab, max(*top_ks, _HEAD if nucleus else 1))
    head = scaled.topk(width, -1).values  # sorted
    for i, k in enumerate(top_ks):
        if k:
            edge[i] = torch.maximum(edge[i], head[i, k - 1])
    if nucleus:
        edge[nucleus] = _nucleus(scaled[nucleus], head[nucleus], edge[nucleus], [params[i].top_p for i in nucleus])
    return edge


def _nucleus(scaled: torch.Tensor, head: torch.Tensor, edge: torch.Tensor, top_p: list[float]) -> torch.Tensor:
    """`edge` raised to the least logit of the smallest set of likeliest tokens with mass top_p; `head` is the sorted
    beginning of each row of `scaled`."""
    wanted = _column(top_p, scaled).double()
    total = scaled.double().masked_fill(scaled < edge, _NEVER).logsumexp(-1, keepdim=True)
    mass = (head.double().masked_fill(head < edge, _NEVER) - total).exp().cumsum(-1)
    # A token is kept while the mass before it is under top_p; the likeliest always is.
    num_kept = (mass < wanted).sum(-1, keepdim=True) + 1
    if bool((num_kept > head.shape[1]).any()) and head.shape[1] < scaled.shape[1]:
        return _nucleus(scaled, scaled.sort(-1, descending=True).values, edge, top_p)
    return torch.maximum(edge, head.gather(1, num_kept.clamp(max=head.shape[1]) - 1))


# -- logprobs ---------------------------------------------------------------------------------------------------------


def with_logprobs(raw: torch.Tensor, chosen: torch.Tensor, num_logprobs: Rows[int]) -> list[Token]:
    """The chosen token of each row with as many of the likeliest as its entry says; -1 = no logprob at all."""
    tokens = [Token(i) for i in on_host(chosen).tolist()]
    rows = [i for i, wanted in enumerate(num_logprobs) if wanted >= 0]
    if not rows:
        return tokens
    logprobs = raw[rows].log_softmax(-1)
    own = on_host(logprobs.gather(1, chosen[rows].unsqueeze(1)).squeeze(1)).tolist()
    most = max(num_logprobs)
    values, ids = logprobs.topk(min(most, raw.shape[1]), -1)
    for row, logprob, top_ids, top_values in zip(
        rows, own, on_host(ids).tolist(), on_host(values).tolist(), strict=True
    ):
        wanted = num_logprobs[row]
        top = tuple(zip(top_ids[:wanted], top_values[:wanted], strict=True))
        tokens[row] = Token(tokens[row].id, logprob, top)
    return tokens

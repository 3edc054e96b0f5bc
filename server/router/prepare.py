"""From a request to prompts in tokens: what is checked at once, and what takes the template and the tokenizer.

`chat` and `completions` check a request (400) and give a `Prepare`, which fills in the job once it has its place in the
queue: prompts, lengths, what the output is held to.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from server.router import checks, openai, structured, tools
from server.router.errors import bad_request
from server.router.generate import Job, lengths
from server.router.openai import Bounds, ChatRequest, CompletionRequest, Request, TokenizeRequest
from server.router.text import Text
from server.router.tools import ToolUse

Prepare = Callable[[Job], Awaitable[None]]
Constraint = tuple[str, str]  # the field it came in, the grammar


class Preparer:
    def __init__(self, text: Text) -> None:
        self._text = text
        self.style = tools.style_of(text.template)

    def chat(self, request: ChatRequest) -> tuple[Prepare, ToolUse | None]:
        """Raises ApiError 400."""
        checks.check_common(request, self._text.vocab_size)
        checks.check_chat(request)
        use = tools.read(request)
        constraint = structured.read(request)
        if use is not None and (forced := use.grammar(self.style)):
            constraint = ("tools", forced)  # what must be a call cannot also be something else
        messages = self._messages(request)

        async def prepare(job: Job) -> None:
            job.prompts = [self._cut(request, await self._read(request, messages, use), "messages")]
            job.max_tokens = lengths(job, self._text.max_len, "messages")
            job.bounds = await self._bounds(request, constraint)
            if request.echo:
                job.echoes = [messages[-1]["content"]]

        return prepare, use

    def completions(self, request: CompletionRequest) -> tuple[Prepare, int]:
        """With the number of prompts. Raises ApiError 400."""
        checks.check_common(request, self._text.vocab_size)
        checks.check_completion(request)
        constraint = structured.read(request)
        prompts = openai.read_prompts(request.prompt)
        checks.check_prompts(prompts, request.num_choices, self._text.vocab_size)

        async def prepare(job: Job) -> None:
            special = request.add_special_tokens is not False
            job.prompts = [await self._encode(request, prompt, special) for prompt in prompts]
            job.max_tokens = lengths(job, self._text.max_len, "prompt")
            job.bounds = await self._bounds(request, constraint)
            if request.echo:
                await self._echo(job, prompts)

        return prepare, len(prompts)

    async def _echo(self, job: Job, prompts: list[str] | list[list[int]]) -> None:
        """What was read: a prompt that was cut is echoed as cut."""
        is_cut = job.request.truncate_prompt_tokens is not None
        if not is_cut and isinstance(prompts[0], str):
            job.echoes = prompts
        else:
            job.echoes = await self._text.decode_all(job.prompts)
        if job.request.num_logprobs >= 0:
            job.echo_offsets = await self._text.offsets(job.prompts, job.echoes)

    async def tokens(self, request: TokenizeRequest) -> list[int]:
        """As the same prompt or messages would be read by the other endpoints. Raises ApiError 400."""
        if request.chat_template is not None:
            raise bad_request("chat_template", "chat_template: this server does not take one from requests")
        if request.messages is not None:
            use = tools.read(ChatRequest(tools=request.tools))
            return await self._read(request, self._messages(request), use)
        if request.prompt is None:
            raise bad_request("prompt", "prompt: give prompt or messages")
        special = request.add_special_tokens is not False
        return await self._text.encode(request.prompt, "prompt", special=special)

    def _messages(self, request: ChatRequest | TokenizeRequest) -> list[dict[str, Any]]:
        if len(request.messages or ()) > self._text.max_len:
            raise bad_request("messages", f"messages: at most {self._text.max_len}, as many as the model takes tokens")
        resume, generation = bool(request.continue_final_message), request.add_generation_prompt
        return checks.read_messages(request.messages, resume=resume, generation=generation)

    async def _read(
        self, request: ChatRequest | TokenizeRequest, messages: list[dict[str, Any]], use: ToolUse | None
    ) -> list[int]:
        resume, special = bool(request.continue_final_message), bool(request.add_special_tokens)
        extra = checks.read_kwargs(request.chat_template_kwargs)
        if not self._text.knows_tools:
            messages = [tools.flatten(message) for message in messages]
            messages = tools.describe(messages, use.tools) if use else messages
        elif use is not None:
            extra = {**extra, "tools": use.tools}
        generation = not resume and request.add_generation_prompt is not False
        return await self._text.encode_chat(
            messages, generation=generation, resume=resume, special=special, extra=extra
        )

    async def _encode(self, request: Request, prompt: str | list[int], special: bool) -> list[int]:
        ids = await self._text.encode(prompt, "prompt", special=special) if isinstance(prompt, str) else prompt
        return self._cut(request, ids, "prompt")

    def _cut(self, request: Request, ids: list[int], param: str) -> list[int]:
        """As the request wants it."""
        if not ids:
            raise bad_request(param, f"{param}: no tokens in it")
        cut = request.truncate_prompt_tokens
        if cut is None:
            return ids
        keep = max(1, self._text.max_len - (request.limit or 1)) if cut == -1 else cut
        return ids[:keep] if request.truncation_side == "right" else ids[-keep:]

    async def _bounds(self, request: Request, constraint: Constraint) -> Bounds:
        """Raises ApiError 400 for a grammar that is none."""
        name, grammar = constraint
        if grammar and (wrong := await self._text.check_grammar(grammar)):
            raise structured.refused(name, wrong)
        return Bounds(name, grammar, await self._text.spellings(request.bad_words or []))

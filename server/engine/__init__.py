"""One engine for every role: blocks, scheduler, attention, model runner, sampler."""

"""The serving side of pdctl: router, prefill and decode processes. Imports nothing from `pdctl`."""

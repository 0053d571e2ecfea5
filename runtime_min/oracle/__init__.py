"""Oracles for the runtime: simulated ranks, PEFT, verification. Shares no code with pool, step, model and ranks."""

"""What checks the runtime: simulated ranks, PEFT as the oracle, and verification. Shares no code with pool, step or model."""

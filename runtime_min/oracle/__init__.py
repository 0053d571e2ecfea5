"""What checks the runtime: simulated ranks, PEFT, verification. Shares no code with pool, step or model."""

"""The intermediate representation: one adapter in normal form, as frozen data without tensors."""

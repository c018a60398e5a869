"""What all decoders share: slots, the tensors of a batch, acceptance, the ends of texts, draft lengths by cost."""

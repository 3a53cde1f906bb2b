"""From logits to tokens to text: sampler, beam search, detokenizer."""

"""vllm-overlay: ordered patches over pinned vLLM and FlashInfer, proven and built into wheels.

Data goes one way: line -> pin -> source -> tree -> wheel, with the checks beside it.
"""

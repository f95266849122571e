"""GGUF and safetensors: headers, tensors, configs; never pickle."""

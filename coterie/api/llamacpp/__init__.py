"""The dialect of llama.cpp's server: completion, infill, properties, templates."""

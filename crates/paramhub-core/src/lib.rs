//! The vocabulary and the rules of paramhub: keys, chunks, placement, wire format, and the sans-IO state machines of hub and worker.

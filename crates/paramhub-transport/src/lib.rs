//! Moves frames between registered buffers: TCP streams and the memory they read and write.

//! The hub server: pinned cores that own chunks, sum, optimise and answer them.

//! A parameter hub for distributed deep-learning training: the public API and the paramhub binary.

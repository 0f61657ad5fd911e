//! Training through the engine and key-value stores, between ranks that are threads here, over real communicators.

mod failures;
mod group;
mod overlap;
mod results;

//! The blocking HTTP client through which hubs, workers and the command line speak to the connection manager.

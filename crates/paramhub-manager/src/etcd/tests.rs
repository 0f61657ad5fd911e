//! Tests with a real etcd, which PATH must have.

//! Table 1 and algorithm 1 of the Poseidon paper as published: parameters moved, sent and received together,
//! for an M x N fully connected layer, P1 workers, P2 servers and K samples per worker.

use super::Scheme;

/// Parameters that machines move for one layer in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParametersMoved {
    /// A machine with only a worker.
    pub worker: f64,
    /// A machine with only a server: the layer is spread evenly over these or, for Adam, one has all of it;
    /// `None` if there are none.
    pub server: Option<f64>,
    /// A machine with both; `None` if there are no servers.
    pub both: Option<f64>,
}

/// A fully connected layer on a cluster, in the paper's letters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FullyConnectedLayer {
    /// M.
    pub m: f64,
    /// N.
    pub n: f64,
    /// K.
    pub k: f64,
    /// P1.
    pub workers: f64,
    /// P2.
    pub servers: f64,
}

impl FullyConnectedLayer {
    /// The PS scheme.
    pub fn parameter_server(&self) -> ParametersMoved {
        let FullyConnectedLayer { m, n, workers, servers, .. } = *self;
        ParametersMoved {
            worker: 2.0 * m * n,
            server: Some(2.0 * workers * m * n / servers),
            both: Some(2.0 * m * n * (workers + servers - 2.0) / servers),
        }
    }

    /// The SFB scheme.
    pub fn sufficient_factors(&self) -> ParametersMoved {
        let FullyConnectedLayer { m, n, k, workers, .. } = *self;
        ParametersMoved { worker: 2.0 * k * (workers - 1.0) * (m + n), server: None, both: None }
    }

    /// The Adam (max) scheme: the server that has the layer.
    pub fn adam(&self) -> ParametersMoved {
        let FullyConnectedLayer { m, n, k, workers, .. } = *self;
        ParametersMoved {
            worker: k * (m + n) + m * n,
            server: Some(workers * m * n + workers * k * (m + n)),
            both: Some((workers - 1.0) * (m * n + k * m + k * n)),
        }
    }

    /// Algorithm 1 for a fully connected layer.
    pub fn best_scheme(&self) -> Scheme {
        let hub = self.parameter_server().both.unwrap_or(f64::INFINITY);
        if self.sufficient_factors().worker <= hub { Scheme::Factors } else { Scheme::Hub }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Section 3.2: "34 million", "34 million", "58.7 million", "3.7 million".
    #[test]
    fn the_example_of_section_3_2() {
        let problem = FullyConnectedLayer { m: 4096.0, n: 4096.0, k: 32.0, workers: 8.0, servers: 8.0 };
        let near = |found: f64, millions: f64| {
            assert!((found / 1e6 / millions - 1.0).abs() < 0.02, "{found}, not {millions} million");
        };
        let hub = problem.parameter_server();
        near(hub.worker, 34.0);
        near(hub.server.unwrap(), 34.0);
        near(hub.both.unwrap(), 58.7);
        near(problem.sufficient_factors().worker, 3.7);
        assert_eq!(problem.best_scheme(), Scheme::Factors);
    }

    /// Section 5.1: GoogLeNet's one fully connected layer, 1000 x 1024, with a batch of 128 on 16 nodes.
    #[test]
    fn the_choice_reduces_to_the_parameter_server_for_googlenet() {
        let problem = FullyConnectedLayer { m: 1000.0, n: 1024.0, k: 128.0, workers: 16.0, servers: 16.0 };
        assert_eq!(problem.best_scheme(), Scheme::Hub);
    }
}

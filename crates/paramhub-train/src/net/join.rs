use std::sync::Arc;

use super::matrix::{Activation, Matrix};

/// Joins branches. All have the same rows and columns.
#[derive(Clone, Debug)]
pub(super) enum Join {
    /// Concatenates the channels of the branches at every position.
    Concatenate {
        /// The number of positions: rows x columns.
        positions: usize,
        /// The channels of each branch.
        channels: Vec<usize>,
    },
    /// Adds branches that have the same channels.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "for residual networks, of which there is none by name yet")
    )]
    Add,
}

impl Join {
    pub(super) fn forward(&self, inputs: Vec<Activation>) -> Activation {
        Arc::new(match self {
            Join::Concatenate { positions, channels } => concatenate(*positions, channels, &inputs),
            Join::Add => {
                let mut inputs = inputs.into_iter();
                let sum = Arc::unwrap_or_clone(inputs.next().expect("a sum has terms"));
                inputs.fold(sum, |sum, term| add(sum, &term))
            }
        })
    }

    /// The gradient of each input.
    pub(super) fn input_gradients(&self, output_gradient: Matrix, inputs: usize) -> Vec<Matrix> {
        match self {
            Join::Concatenate { positions, channels } => split(*positions, channels, &output_gradient),
            Join::Add => vec![output_gradient; inputs],
        }
    }
}

/// The sum, in the order given.
pub(super) fn total(terms: Vec<Matrix>) -> Matrix {
    terms.into_iter().reduce(|sum, term| add(sum, &term)).expect("a sum has terms")
}

fn add(mut sum: Matrix, term: &Matrix) -> Matrix {
    sum.values_mut().iter_mut().zip(term.values()).for_each(|(sum, value)| *sum += value);
    sum
}

fn concatenate(positions: usize, channels: &[usize], inputs: &[Activation]) -> Matrix {
    let all = channels.iter().sum::<usize>();
    let mut output = Matrix::zeros(inputs[0].rows(), positions * all);
    let mut first = 0;
    for (input, &own) in inputs.iter().zip(channels) {
        let from = input.values().chunks_exact(own);
        for (to, from) in output.values_mut().chunks_exact_mut(all).zip(from) {
            to[first..][..own].copy_from_slice(from);
        }
        first += own;
    }
    output
}

fn split(positions: usize, channels: &[usize], gradient: &Matrix) -> Vec<Matrix> {
    let all = channels.iter().sum::<usize>();
    let mut first = 0;
    let part = |&own: &usize| {
        let mut part = Vec::with_capacity(gradient.rows() * positions * own);
        gradient.values().chunks_exact(all).for_each(|from| part.extend_from_slice(&from[first..][..own]));
        first += own;
        Matrix::new(part, positions * own)
    };
    channels.iter().map(part).collect()
}

use candle_core::{Device, Result, Tensor};

use super::storage;

/// Where branches meet. All come with the same rows and columns.
#[derive(Clone, Debug)]
pub(super) enum Join {
    /// One branch's channels after the other's, at every position.
    Concatenate {
        /// Rows x columns.
        positions: usize,
        /// Of each branch.
        channels: Vec<usize>,
    },
    /// The sum of branches that have the same channels.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "for residual networks, of which there is none by name yet")
    )]
    Add,
}

impl Join {
    pub(super) fn forward(&self, inputs: Vec<Tensor>) -> Result<Tensor> {
        match self {
            Join::Concatenate { positions, channels } => concatenate(*positions, channels, &inputs),
            Join::Add => {
                // What came in may be what its layer remembers.
                let mut inputs = inputs.into_iter();
                let first = inputs.next().expect("a sum has terms").copy()?;
                total(std::iter::once(first).chain(inputs))
            }
        }
    }

    /// The gradient of each input, in memory of its own: whoever gets it may change it.
    pub(super) fn input_gradients(&self, output_gradient: Tensor, inputs: usize) -> Result<Vec<Tensor>> {
        match self {
            Join::Concatenate { positions, channels } => split(*positions, channels, &output_gradient),
            Join::Add => {
                let copies = (1..inputs).map(|_| output_gradient.copy()).collect::<Result<Vec<_>>>()?;
                Ok(std::iter::once(output_gradient).chain(copies).collect())
            }
        }
    }
}

/// The sum, in the order given, in the memory of the first, which must be nobody else's.
pub(super) fn total(terms: impl IntoIterator<Item = Tensor>) -> Result<Tensor> {
    let mut terms = terms.into_iter();
    let sum = terms.next().expect("a sum has terms");
    for term in terms {
        storage::read(&term, |term| {
            storage::update(&sum, |sum| sum.iter_mut().zip(term).for_each(|(sum, value)| *sum += value))
        })??;
    }
    Ok(sum)
}

fn concatenate(positions: usize, channels: &[usize], inputs: &[Tensor]) -> Result<Tensor> {
    let (batch, all) = (inputs[0].dim(0)?, channels.iter().sum::<usize>());
    let mut output = vec![0.0; batch * positions * all];
    let mut first = 0;
    for (input, &own) in inputs.iter().zip(channels) {
        storage::read(input, |values| {
            for (to, from) in output.chunks_exact_mut(all).zip(values.chunks_exact(own)) {
                to[first..][..own].copy_from_slice(from);
            }
        })?;
        first += own;
    }
    Tensor::from_vec(output, (batch, positions * all), &Device::Cpu)
}

fn split(positions: usize, channels: &[usize], gradient: &Tensor) -> Result<Vec<Tensor>> {
    let (batch, all) = (gradient.dim(0)?, channels.iter().sum::<usize>());
    let mut first = 0;
    let part = |&own: &usize| {
        let mut part = Vec::with_capacity(batch * positions * own);
        storage::read(gradient, |values| {
            values.chunks_exact(all).for_each(|from| part.extend_from_slice(&from[first..][..own]))
        })?;
        first += own;
        Tensor::from_vec(part, (batch, positions * own), &Device::Cpu)
    };
    channels.iter().map(part).collect()
}

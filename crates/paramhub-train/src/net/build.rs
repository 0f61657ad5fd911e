use paramhub_core::key::Key;

use super::convolution::Convolution;
use super::layer::{Layer, Parameters};
use super::linear::Linear;
use super::pool::{AveragePool, MaxPool};
use super::relu::Relu;
use super::window::Window;
use super::{NetError, NetKind, Network, Stage};
use crate::data::Geometry;
use crate::random::Random;

/// Separates initial parameters from every other use of the seed.
const PURPOSE: u64 = 2;

pub(super) fn network(kind: NetKind, geometry: Geometry, seed: u64) -> Result<Network, NetError> {
    let Geometry { channels, height, width, classes } = geometry;
    let mut builder = Builder {
        kind,
        geometry,
        seed,
        extents: [height, width, channels],
        stages: Vec::new(),
        keys: Vec::new(),
    };
    match kind {
        NetKind::Mlp => {
            builder.linear("fc1", 128)?.relu();
            builder.linear("fc2", 64)?.relu();
            builder.last("fc3", classes)?;
        }
        NetKind::Lenet => {
            let (side, padding) = if height.min(width) >= 28 { (5, 0) } else { (3, 1) };
            builder.convolution("conv1", side, padding, 20)?.relu();
            builder.pool("pool1", 2, Pool::Max)?;
            builder.convolution("conv2", side, padding, 50)?.relu();
            builder.pool("pool2", 2, Pool::Max)?;
            builder.linear("fc1", 500)?.relu();
            builder.last("fc2", classes)?;
        }
        NetKind::CifarQuick => {
            builder.convolution("conv1", 5, 2, 32)?.pool("pool1", 3, Pool::Max)?.relu();
            builder.convolution("conv2", 5, 2, 32)?.relu().pool("pool2", 3, Pool::Average)?;
            builder.convolution("conv3", 5, 2, 64)?.relu().pool("pool3", 3, Pool::Average)?;
            builder.linear("fc1", 64)?;
            builder.last("fc2", classes)?;
        }
    }
    Ok(Network { geometry, stages: builder.stages, keys: builder.keys })
}

enum Pool {
    Max,
    Average,
}

/// Adds layers one after the other, following the extents of the activation.
struct Builder {
    kind: NetKind,
    geometry: Geometry,
    seed: u64,
    /// Rows, columns, channels.
    extents: [usize; 3],
    stages: Vec<Stage>,
    keys: Vec<Key>,
}

impl Builder {
    fn convolution(
        &mut self,
        name: &str,
        side: usize,
        padding: usize,
        outputs: usize,
    ) -> Result<&mut Self, NetError> {
        let [height, width, channels] = self.extents;
        let window = Window { height, width, channels, side, stride: 1, padding, partial: false };
        let (rows, columns) = self.positions(name, &window)?;
        let parameters = self.parameters(name, &[outputs, side, side, channels], 2.0)?;
        self.extents = [rows, columns, outputs];
        Ok(self.keyed(Convolution::new(window, parameters)))
    }

    /// Pooling with stride 2.
    fn pool(&mut self, name: &str, side: usize, pool: Pool) -> Result<&mut Self, NetError> {
        let [height, width, channels] = self.extents;
        let window = Window { height, width, channels, side, stride: 2, padding: 0, partial: side > 2 };
        let (rows, columns) = self.positions(name, &window)?;
        self.extents = [rows, columns, channels];
        match pool {
            Pool::Max => self.plain(MaxPool::new(window)),
            Pool::Average => self.plain(AveragePool::new(window)),
        }
        Ok(self)
    }

    fn relu(&mut self) -> &mut Self {
        self.plain(Relu::default());
        self
    }

    fn linear(&mut self, name: &str, outputs: usize) -> Result<&mut Self, NetError> {
        self.fully_connected(name, outputs, 2.0)
    }

    fn last(&mut self, name: &str, outputs: usize) -> Result<&mut Self, NetError> {
        self.fully_connected(name, outputs, 1.0)
    }

    fn fully_connected(&mut self, name: &str, outputs: usize, gain: f64) -> Result<&mut Self, NetError> {
        let inputs = self.extents.iter().product();
        let parameters = self.parameters(name, &[outputs, inputs], gain)?;
        self.extents = [1, 1, outputs];
        Ok(self.keyed(Linear::new(parameters)))
    }

    /// Weights uniform in ±sqrt(3 gain / inputs), whose variance is gain / inputs. Uniform rather than normal: a square
    /// root is exact on every machine, a logarithm is not.
    fn parameters(&mut self, name: &str, shape: &[usize], gain: f64) -> Result<Parameters, NetError> {
        let mut random = Random::new(self.seed, &[PURPOSE, self.keys.len() as u64]);
        let (outputs, inputs) = (shape[0], shape[1..].iter().product::<usize>());
        let bound = (3.0 * gain / inputs as f64).sqrt() as f32;
        let weight = (0..outputs * inputs).map(|_| (2.0 * random.uniform() - 1.0) * bound).collect();
        let extents: Vec<u64> = shape.iter().map(|&extent| extent as u64).collect();
        self.keys.push(Key::new(format!("{name}.weight"), extents));
        self.keys.push(Key::new(format!("{name}.bias"), [outputs as u64]));
        Ok(Parameters::new(weight, outputs)?)
    }

    fn positions(&self, name: &str, window: &Window) -> Result<(usize, usize), NetError> {
        let (kind, geometry) = (self.kind, self.geometry);
        window.output().ok_or_else(|| NetError::TooSmall { kind, geometry, layer: name.to_owned() })
    }

    fn keyed(&mut self, layer: impl Layer + 'static) -> &mut Self {
        self.stages.push(Stage { layer: Box::new(layer), first_key: Some(self.keys.len() - 2) });
        self
    }

    fn plain(&mut self, layer: impl Layer + 'static) {
        self.stages.push(Stage { layer: Box::new(layer), first_key: None });
    }
}

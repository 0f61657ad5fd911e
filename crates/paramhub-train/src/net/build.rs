use paramhub_core::key::Key;

use super::convolution::Convolution;
use super::join::Join;
use super::layer::Layer;
use super::linear::Linear;
use super::node::{Node, Work};
use super::parameters::LinearMap;
use super::pool::{AveragePool, MaxPool};
use super::relu::Relu;
use super::window::Window;
use super::{NetError, NetKind, Network};
use crate::data::Geometry;
use crate::random::Random;

/// Separates initial parameters from every other use of the seed.
const PURPOSE: u64 = 2;

pub(super) enum Pool {
    Max,
    Average,
}

/// The position of the next layer: after a node, or after the images.
#[derive(Clone, Copy, Debug)]
pub(super) struct BranchEnd {
    after: Option<usize>,
    /// Rows, columns and channels of the activation there.
    extents: [usize; 3],
}

/// Adds layers one after the other, following the extents of the activation. For a branch it goes back to the
/// branch's beginning.
pub(super) struct Builder {
    kind: NetKind,
    geometry: Geometry,
    seed: u64,
    tip: BranchEnd,
    /// The nodes, each after all that it follows.
    nodes: Vec<Planned>,
    keys: Vec<Key>,
}

struct Planned {
    name: String,
    after: Vec<Option<usize>>,
    first_key: Option<usize>,
    work: Work,
}

impl Builder {
    pub(super) fn new(kind: NetKind, geometry: Geometry, seed: u64) -> Builder {
        let Geometry { channels, height, width, .. } = geometry;
        let tip = BranchEnd { after: None, extents: [height, width, channels] };
        Builder { kind, geometry, seed, tip, nodes: Vec::new(), keys: Vec::new() }
    }

    /// The position of the next layer.
    pub(super) fn tip(&self) -> BranchEnd {
        self.tip
    }

    /// Sets the position of the next layer.
    pub(super) fn resume(&mut self, tip: BranchEnd) {
        self.tip = tip;
    }

    pub(super) fn convolution(
        &mut self,
        name: &str,
        side: usize,
        padding: usize,
        outputs: usize,
    ) -> Result<&mut Self, NetError> {
        let window = Window { padding, ..self.window(side, 1) };
        let (rows, columns) = self.positions(name, &window)?;
        let parameters = self.parameters(name, &[outputs, side, side, window.channels], 2.0);
        Ok(self.keyed(name, Convolution::new(window, parameters), [rows, columns, outputs]))
    }

    /// Pooling with stride 2.
    pub(super) fn pool(&mut self, name: &str, side: usize, pool: Pool) -> Result<&mut Self, NetError> {
        let window = Window { partial: side > 2, ..self.window(side, 2) };
        let (rows, columns) = self.positions(name, &window)?;
        let extents = [rows, columns, window.channels];
        Ok(match pool {
            Pool::Max => self.plain(name, MaxPool::new(window), extents),
            Pool::Average => self.plain(name, AveragePool::new(window), extents),
        })
    }

    /// Average pooling with an odd side, which keeps rows and columns.
    pub(super) fn pool_same(&mut self, name: &str, side: usize) -> Result<&mut Self, NetError> {
        let window = Window { padding: side / 2, ..self.window(side, 1) };
        let (rows, columns) = self.positions(name, &window)?;
        Ok(self.plain(name, AveragePool::new(window), [rows, columns, window.channels]))
    }

    /// The mean of each channel over all positions.
    pub(super) fn pool_all(&mut self, name: &str) -> &mut Self {
        let [height, width, channels] = self.tip.extents;
        let side = height.max(width);
        let window = Window { partial: true, ..self.window(side, side) };
        self.plain(name, AveragePool::new(window), [1, 1, channels])
    }

    pub(super) fn relu(&mut self) -> &mut Self {
        let before = self.tip.after.map_or("input", |node| &self.nodes[node].name);
        let name = format!("{before}.relu");
        self.plain(&name, Relu::default(), self.tip.extents)
    }

    pub(super) fn linear(&mut self, name: &str, outputs: usize) -> &mut Self {
        self.fully_connected(name, outputs, 2.0)
    }

    pub(super) fn last(&mut self, name: &str, outputs: usize) -> &mut Self {
        self.fully_connected(name, outputs, 1.0)
    }

    /// Concatenates the channels of branches.
    pub(super) fn concatenate(&mut self, name: &str, branches: &[BranchEnd]) -> &mut Self {
        let [rows, columns, _] = branches[0].extents;
        assert!(
            branches.iter().all(|branch| branch.extents[..2] == [rows, columns]),
            "{name}: extents differ"
        );
        let channels: Vec<usize> = branches.iter().map(|branch| branch.extents[2]).collect();
        let extents = [rows, columns, channels.iter().sum()];
        self.join(name, branches, Join::Concatenate { positions: rows * columns, channels }, extents)
    }

    /// Adds branches with the same extents.
    #[cfg(test)]
    pub(super) fn add(&mut self, name: &str, branches: &[BranchEnd]) -> &mut Self {
        let extents = branches[0].extents;
        assert!(branches.iter().all(|branch| branch.extents == extents), "{name}: extents differ");
        self.join(name, branches, Join::Add, extents)
    }

    /// Adds the edges. The output of the last layer is that of the network.
    pub(super) fn network(self) -> Network {
        let Builder { geometry, nodes: planned, keys, .. } = self;
        let last = planned.len() - 1;
        let mut nodes = Vec::new();
        let mut edges = 0;
        let mut edge = || {
            edges += 1;
            edges - 1
        };
        let (mut after_images, mut parameters) = (Vec::new(), Vec::new());
        for (at, Planned { name, after, first_key, work }) in planned.into_iter().enumerate() {
            let mut node = Node::new(name, first_key, work);
            for &before in &after {
                let edge = edge();
                node.inputs.push(edge);
                match before {
                    Some(before) => {
                        let before: &mut Node = &mut nodes[before];
                        before.outputs.push(edge);
                        node.passes_gradient |= before.is_trained;
                    }
                    None => after_images.push(edge),
                }
            }
            node.is_trained = first_key.is_some() || node.passes_gradient;
            parameters.extend(node.parameters().into_iter().flatten());
            if at == last {
                node.outputs.push(edge());
            }
            nodes.push(node);
        }
        assert!(nodes.iter().all(|node| !node.outputs.is_empty()), "a branch ends nowhere");
        Network::new_graph(geometry, nodes, edges, after_images, keys, parameters)
    }

    fn fully_connected(&mut self, name: &str, outputs: usize, gain: f64) -> &mut Self {
        let inputs = self.tip.extents.iter().product();
        let parameters = self.parameters(name, &[outputs, inputs], gain);
        self.keyed(name, Linear::new(parameters), [1, 1, outputs])
    }

    /// Weights uniform in ±sqrt(3 gain / inputs), whose variance is gain / inputs. They are uniform rather
    /// than normal because a square root is exact on every machine and a logarithm is not.
    fn parameters(&mut self, name: &str, shape: &[usize], gain: f64) -> LinearMap {
        let mut random = Random::new(self.seed, &[PURPOSE, self.keys.len() as u64]);
        let (outputs, inputs) = (shape[0], shape[1..].iter().product::<usize>());
        let bound = (3.0 * gain / inputs as f64).sqrt() as f32;
        let weight = (0..outputs * inputs).map(|_| (2.0 * random.uniform() - 1.0) * bound).collect();
        let extents: Vec<u64> = shape.iter().map(|&extent| extent as u64).collect();
        self.keys.push(Key::new(format!("{name}.weight"), extents));
        self.keys.push(Key::new(format!("{name}.bias"), [outputs as u64]));
        LinearMap::new(weight, outputs)
    }

    /// A window without padding, which must not stick out.
    fn window(&self, side: usize, stride: usize) -> Window {
        let [height, width, channels] = self.tip.extents;
        Window { height, width, channels, side, stride, padding: 0, partial: false }
    }

    fn positions(&self, name: &str, window: &Window) -> Result<(usize, usize), NetError> {
        let (kind, geometry) = (self.kind, self.geometry);
        window.output().ok_or_else(|| NetError::TooSmall { kind, geometry, layer: name.to_owned() })
    }

    fn keyed(&mut self, name: &str, layer: impl Layer + 'static, extents: [usize; 3]) -> &mut Self {
        let first_key = Some(self.keys.len() - 2);
        self.append(name, vec![self.tip.after], first_key, Work::Layer(Box::new(layer)), extents)
    }

    fn plain(&mut self, name: &str, layer: impl Layer + 'static, extents: [usize; 3]) -> &mut Self {
        self.append(name, vec![self.tip.after], None, Work::Layer(Box::new(layer)), extents)
    }

    fn join(&mut self, name: &str, branches: &[BranchEnd], join: Join, extents: [usize; 3]) -> &mut Self {
        let after = branches.iter().map(|branch| branch.after).collect();
        self.append(name, after, None, Work::Join(join), extents)
    }

    fn append(
        &mut self,
        name: &str,
        after: Vec<Option<usize>>,
        first_key: Option<usize>,
        work: Work,
        extents: [usize; 3],
    ) -> &mut Self {
        self.nodes.push(Planned { name: name.to_owned(), after, first_key, work });
        self.tip = BranchEnd { after: Some(self.nodes.len() - 1), extents };
        self
    }
}

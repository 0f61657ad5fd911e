//! The layers of the networks.

use super::build::{Builder, Pool};
use super::{NetError, NetKind, Network};
use crate::data::Geometry;

pub(super) fn network(kind: NetKind, geometry: Geometry, seed: u64) -> Result<Network, NetError> {
    let Geometry { height, width, classes, .. } = geometry;
    let mut builder = Builder::new(kind, geometry, seed);
    match kind {
        NetKind::Mlp => {
            builder.linear("fc1", 128).relu();
            builder.linear("fc2", 64).relu();
        }
        NetKind::Lenet => {
            let (side, padding) = if height.min(width) >= 28 { (5, 0) } else { (3, 1) };
            builder.convolution("conv1", side, padding, 20)?.relu();
            builder.pool("pool1", 2, Pool::Max)?;
            builder.convolution("conv2", side, padding, 50)?.relu();
            builder.pool("pool2", 2, Pool::Max)?;
            builder.linear("fc1", 500).relu();
        }
        NetKind::CifarQuick => {
            builder.convolution("conv1", 5, 2, 32)?.pool("pool1", 3, Pool::Max)?.relu();
            builder.convolution("conv2", 5, 2, 32)?.relu().pool("pool2", 3, Pool::Average)?;
            builder.convolution("conv3", 5, 2, 64)?.relu().pool("pool3", 3, Pool::Average)?;
            builder.linear("fc1", 64);
        }
        NetKind::Inception => {
            builder.convolution("stem", 3, 1, 16)?.relu();
            if height.min(width) >= 16 {
                builder.pool("stem.pool", 3, Pool::Max)?;
            }
            inception(&mut builder, "a", [16, 8, 16, 4, 8, 8])?;
            builder.pool("a.pool", 3, Pool::Max)?;
            inception(&mut builder, "b", [24, 16, 32, 8, 16, 16])?;
            inception(&mut builder, "c", [32, 16, 48, 8, 16, 16])?;
            builder.pool_all("pool");
        }
    }
    let last = match kind {
        NetKind::Mlp => "fc3",
        NetKind::Lenet | NetKind::CifarQuick => "fc2",
        NetKind::Inception => "fc",
    };
    builder.last(last, classes);
    Ok(builder.network())
}

/// A block of four branches. Its channels are those of the 1x1 convolution; of the 3x3 convolution and of the
/// reduction before it; of the pair of 3x3 convolutions, as in Inception-BN in place of a 5x5 one, and of
/// their reduction; and of the convolution after the pooling.
fn inception(
    builder: &mut Builder,
    block: &str,
    [one, reduced, three, doubly_reduced, double, pooled]: [usize; 6],
) -> Result<(), NetError> {
    let fork = builder.tip();
    let name = |layer: &str| format!("{block}.{layer}");
    let mut branches = Vec::new();
    let mut branch = |pooled: Option<&str>, convolutions: &[(&str, usize, usize)]| -> Result<(), NetError> {
        builder.resume(fork);
        if let Some(layer) = pooled {
            builder.pool_same(&name(layer), 3)?;
        }
        for &(layer, side, outputs) in convolutions {
            builder.convolution(&name(layer), side, side / 2, outputs)?.relu();
        }
        branches.push(builder.tip());
        Ok(())
    };
    branch(None, &[("1x1", 1, one)])?;
    branch(None, &[("3x3.reduce", 1, reduced), ("3x3", 3, three)])?;
    branch(None, &[("double.reduce", 1, doubly_reduced), ("double.1", 3, double), ("double.2", 3, double)])?;
    branch(Some("pool"), &[("pool.1x1", 1, pooled)])?;
    builder.concatenate(&name("concatenate"), &branches);
    Ok(())
}

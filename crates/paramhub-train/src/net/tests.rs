//! Tests each layer against an independent reference, and every network's gradients against finite
//! differences.

use std::sync::Arc;

use super::build::Builder;
use super::convolution::Convolution;
use super::join::Join;
use super::layer::Layer;
use super::matrix::Matrix;
use super::parameters::LinearMap;
use super::pool::{AveragePool, MaxPool};
use super::window::Window;
use super::{LayerGradient, NetError, NetKind, Network, input_of};
use crate::data::Geometry;
use crate::random::Random;

const SEED: u64 = 20;

fn random_values(count: usize, stream: u64) -> Vec<f32> {
    let mut random = Random::new(SEED, &[stream]);
    (0..count).map(|_| 2.0 * random.uniform() - 1.0).collect()
}

#[track_caller]
fn assert_close(found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len());
    let largest = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(largest <= tolerance, "differs by {largest} (seed {SEED})");
}

/// A convolution and its gradients, term by term in f64.
struct ReferenceConvolution {
    output: Vec<f64>,
    weight_gradient: Vec<f64>,
    bias_gradient: Vec<f64>,
    input_gradient: Vec<f64>,
}

impl ReferenceConvolution {
    fn new(window: &Window, [weight, bias, input, output_gradient]: [&[f32]; 4]) -> ReferenceConvolution {
        let Window { height, width, channels, side, stride, padding, .. } = *window;
        let (rows, columns) = window.output().unwrap();
        let outputs = bias.len();
        let mut reference = ReferenceConvolution {
            output: vec![0.0; output_gradient.len()],
            weight_gradient: vec![0.0; weight.len()],
            bias_gradient: vec![0.0; outputs],
            input_gradient: vec![0.0; input.len()],
        };
        for (at, &gradient) in output_gradient.iter().enumerate() {
            let (place, output) = (at / outputs, at % outputs);
            let (image, row, column) = (place / columns / rows, place / columns % rows, place % columns);
            let gradient = f64::from(gradient);
            reference.output[at] += f64::from(bias[output]);
            reference.bias_gradient[output] += gradient;
            for term in 0..side * side * channels {
                let (y, x) =
                    (row * stride + term / channels / side, column * stride + term / channels % side);
                if !(padding..height + padding).contains(&y) || !(padding..width + padding).contains(&x) {
                    continue;
                }
                let from =
                    ((image * height + y - padding) * width + x - padding) * channels + term % channels;
                let by = output * side * side * channels + term;
                reference.output[at] += f64::from(weight[by]) * f64::from(input[from]);
                reference.weight_gradient[by] += gradient * f64::from(input[from]);
                reference.input_gradient[from] += gradient * f64::from(weight[by]);
            }
        }
        reference
    }
}

#[test]
fn convolution_and_its_gradients_are_the_sums_over_all_windows() {
    let single = |values: &[f64]| values.iter().map(|&value| value as f32).collect::<Vec<_>>();
    for (side, padding, stride, [height, width, channels, outputs]) in
        [(3, 1, 1, [8, 8, 1, 4]), (5, 2, 1, [6, 7, 3, 2]), (5, 0, 1, [9, 6, 2, 3]), (3, 1, 2, [7, 7, 2, 3])]
    {
        let window = Window { height, width, channels, side, stride, padding, partial: false };
        let (rows, columns) = window.output().unwrap();
        let batch = 3;
        let weight = random_values(outputs * side * side * channels, 1);
        let bias = random_values(outputs, 2);
        let input = random_values(batch * window.features(), 3);
        let output_gradient = random_values(batch * rows * columns * outputs, 4);
        let expected = ReferenceConvolution::new(&window, [&weight, &bias, &input, &output_gradient]);

        let parameters = LinearMap::new(weight, outputs);
        parameters.bias.update(|values| values.copy_from_slice(&bias));
        let mut layer = Convolution::new(window, parameters);
        let output_gradient = Matrix::new(output_gradient, rows * columns * outputs);
        for _twice in 0..2 {
            let output = layer.forward(Arc::new(Matrix::new(input.clone(), window.features())), true);
            assert_close(output.values(), &single(&expected.output), 1e-5);
            let [weight_gradient, bias_gradient] = layer.parameter_gradients(&output_gradient);
            assert_close(&weight_gradient, &single(&expected.weight_gradient), 1e-4);
            assert_close(&bias_gradient, &single(&expected.bias_gradient), 1e-4);
            let input_gradient = layer.input_gradient(output_gradient.clone());
            assert_close(input_gradient.values(), &single(&expected.input_gradient), 1e-4);
        }
    }
}

#[test]
fn pooling_follows_caffes_partial_windows() {
    // 4x4 pixels, one channel: windows of 3 with stride 2 cover columns 0-2 and 2-3.
    let window = Window { height: 4, width: 4, channels: 1, side: 3, stride: 2, padding: 0, partial: true };
    let input = || Arc::new(Matrix::new((0..16).map(|value| value as f32).collect(), 16));
    let gradient = || Matrix::new(vec![9.0, 6.0, 6.0, 4.0], 4);

    let mut largest = MaxPool::new(window);
    assert_eq!(largest.forward(input(), true).values(), [10.0, 11.0, 14.0, 15.0]);
    let mut expected = [0.0; 16];
    [expected[10], expected[11], expected[14], expected[15]] = [9.0, 6.0, 6.0, 4.0];
    assert_eq!(largest.input_gradient(gradient()).values(), expected);

    let mut mean = AveragePool::new(window);
    assert_eq!(mean.forward(input(), true).values(), [5.0, 6.5, 11.0, 12.5]);
    let expected = [1., 1., 2., 1., 1., 1., 2., 1., 2., 2., 4., 2., 1., 1., 2., 1.];
    assert_eq!(mean.input_gradient(gradient()).values(), expected);
}

#[test]
fn pooling_keeps_channels_and_images_apart() {
    // Two images of 2x2 pixels with two channels; the values of the second channel fall.
    let window = Window { height: 2, width: 2, channels: 2, side: 2, stride: 2, padding: 0, partial: false };
    let images: Vec<f32> = vec![0., 7., 1., 5., 2., 3., 3., 1., 4., 6., 4., 6., 4., 6., 4., 6.];
    let input = || Arc::new(Matrix::new(images.clone(), 8));
    let mut largest = MaxPool::new(window);
    assert_eq!(largest.forward(input(), true).values(), [3.0, 7.0, 4.0, 6.0]);
    let gradient = Matrix::new(vec![1.0, 2.0, 3.0, 4.0], 2);
    let expected = [0., 2., 0., 0., 0., 0., 1., 0., 3., 4., 0., 0., 0., 0., 0., 0.];
    assert_eq!(largest.input_gradient(gradient).values(), expected);
    assert_eq!(AveragePool::new(window).forward(input(), true).values(), [1.5, 4.0, 4.0, 6.0]);
}

/// The mean loss of `network` on a batch.
fn loss(network: &mut Network, images: &[f32], labels: &[u8]) -> f64 {
    let logits = network.forward(images.to_vec(), |_, _| Ok::<(), NetError>(())).unwrap();
    network.loss(logits, labels).0
}

#[test]
fn gradients_equal_finite_differences() {
    let of = |kind, geometry| (kind, Network::new(kind, geometry, SEED).unwrap());
    let small = |channels, height, width, classes| Geometry { channels, height, width, classes };
    for (kind, mut network) in [
        of(NetKind::Mlp, small(1, 4, 4, 10)),
        of(NetKind::Lenet, small(1, 8, 8, 10)),
        of(NetKind::Lenet, small(3, 28, 28, 5)),
        of(NetKind::CifarQuick, small(3, 12, 10, 4)),
        of(NetKind::Inception, small(1, 8, 8, 10)),
        of(NetKind::Inception, small(3, 17, 16, 4)),
        (NetKind::Mlp, crossed()),
    ] {
        let geometry = network.geometry();
        let batch = 4;
        let images = random_values(batch * geometry.features(), 5);
        let labels: Vec<u8> = (0..batch).map(|example| (example * 3 % geometry.classes) as u8).collect();
        let logits = network.forward(images.clone(), |_, _| Ok::<(), NetError>(())).unwrap();
        let (_, gradient) = network.loss(logits, &labels);
        let mut gradients = vec![Vec::new(); network.keys().len()];
        network
            .backward(
                gradient,
                |_| false,
                |weight, made| -> Result<(), NetError> {
                    let LayerGradient::Dense(both) = made else { panic!("this layer takes no factors") };
                    gradients[weight..weight + 2].clone_from_slice(&both);
                    Ok(())
                },
            )
            .unwrap();
        for (key, gradient) in gradients.iter().enumerate() {
            // The slope is measured along the gradient itself, where it is the norm, and along a random
            // direction with a part of the gradient.
            let norm = gradient.iter().map(|g| f64::from(g * g)).sum::<f64>().sqrt() as f32;
            let random = random_values(gradient.len(), 100 + key as u64);
            let random_norm = random.iter().map(|value| value * value).sum::<f32>().sqrt();
            for share in [1.0, 0.5] {
                let direction: Vec<f32> = gradient
                    .iter()
                    .zip(&random)
                    .map(|(g, r)| share * g / norm + (1.0 - share) * r / random_norm)
                    .collect();
                let slope: f64 =
                    gradient.iter().zip(&direction).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
                let original = network.parameters(key);
                // With a step this small, few activations cross a bend of ReLU or of max pooling.
                let epsilon = 5e-4;
                let mut moved = |step: f32| {
                    let values: Vec<f32> =
                        original.iter().zip(&direction).map(|(w, d)| w + step * d).collect();
                    network.lend_parameters(key, |parameters| *parameters = values).unwrap();
                    loss(&mut network, &images, &labels)
                };
                let measured = (moved(epsilon) - moved(-epsilon)) / f64::from(2.0 * epsilon);
                network.lend_parameters(key, |parameters| *parameters = original).unwrap();
                let name = &network.keys()[key].name;
                assert!(
                    (measured - slope).abs() <= 0.02 * f64::from(norm) + 2e-4,
                    "{kind} {geometry} {name}: slope {slope}, measured {measured} (seed {SEED})"
                );
            }
        }
    }
}

/// Branches of the images, one without a key, that are concatenated, forked again, added, and concatenated
/// once more with their sum.
fn crossed() -> Network {
    let mut builder =
        Builder::new(NetKind::Mlp, Geometry { channels: 2, height: 6, width: 5, classes: 3 }, SEED);
    let images = builder.tip();
    let bare = builder.pool_same("bare", 3).unwrap().tip();
    builder.resume(images);
    let convolved = builder.convolution("first", 3, 1, 3).unwrap().relu().tip();
    let both = builder.concatenate("both", &[bare, convolved]).tip();
    let left = builder.convolution("left", 3, 1, 4).unwrap().relu().tip();
    builder.resume(both);
    let right = builder.convolution("right", 1, 0, 4).unwrap().tip();
    let sum = builder.add("sum", &[left, right, left]).tip();
    builder.concatenate("again", &[sum, both, sum]).pool_all("mean").last("fc", 3);
    builder.network()
}

#[test]
fn joins_keep_channels_and_images_apart_and_leave_their_inputs_alone() {
    // Two images of two positions; branches of one and two channels.
    let activation = |values: &[f32], columns| Arc::new(Matrix::new(values.to_vec(), columns));
    let (one, two) = (activation(&[1., 2., 3., 4.], 2), activation(&[5., 6., 7., 8., 9., 10., 11., 12.], 4));
    let join = Join::Concatenate { positions: 2, channels: vec![1, 2] };
    let joined = join.forward(vec![one.clone(), two.clone()]);
    assert_eq!(joined.values(), [1., 5., 6., 2., 7., 8., 3., 9., 10., 4., 11., 12.]);
    let apart = join.input_gradients(Arc::unwrap_or_clone(joined), 2);
    assert_eq!(apart, [one.as_ref().clone(), two.as_ref().clone()]);

    let sum = Join::Add.forward(vec![one.clone(), one.clone(), one.clone()]);
    assert_eq!((sum.values(), one.values()), (&[3., 6., 9., 12.][..], &[1., 2., 3., 4.][..]));
    let gradients = Join::Add.input_gradients(Arc::unwrap_or_clone(sum), 2);
    assert_eq!(gradients, [Matrix::new(vec![3., 6., 9., 12.], 2), Matrix::new(vec![3., 6., 9., 12.], 2)]);
}

#[test]
fn the_mean_of_all_positions_is_one_per_channel() {
    let geometry = Geometry { channels: 2, height: 1, width: 3, classes: 2 };
    let mut builder = Builder::new(NetKind::Mlp, geometry, SEED);
    builder.pool_all("mean");
    let mut network = builder.network();
    let logits = network.forward(vec![1., 10., 2., 20., 6., 60.], |_, _| Ok::<(), NetError>(())).unwrap();
    assert_eq!(logits.values(), [3.0, 30.0]);
}

#[test]
fn relu_leaves_its_input_to_the_others_that_need_it() {
    // The output of `left` is the last term of the sum in one network and the first in the other.
    for relu_first in [true, false] {
        let geometry = Geometry { channels: 1, height: 1, width: 4, classes: 4 };
        let mut builder = Builder::new(NetKind::Mlp, geometry, SEED);
        let left = builder.linear("left", 4).tip();
        let relu = builder.relu().tip();
        builder.add("sum", &if relu_first { [relu, left] } else { [left, relu] });
        let mut network = builder.network();
        let identity = (0..16).map(|at| if at % 5 == 0 { 1.0 } else { 0.0 }).collect();
        network.lend_parameters(0, |weight| *weight = identity).unwrap();
        let logits = network.forward(vec![-1.0, 2.0, -3.0, 4.0], |_, _| Ok::<(), NetError>(())).unwrap();
        assert_eq!(logits.values(), [-1.0, 4.0, -3.0, 8.0]);
    }
}

#[test]
fn a_graph_without_branches_computes_as_a_loop_over_its_layers() {
    for kind in [NetKind::Mlp, NetKind::Lenet, NetKind::CifarQuick] {
        let geometry = Geometry { channels: 3, height: 12, width: 10, classes: 4 };
        let (images, labels) = (random_values(4 * geometry.features(), 5), [3, 0, 2, 1]);

        let looped = Network::new(kind, geometry, SEED).unwrap();
        let mut activation = input_of(images.clone(), geometry);
        for node in &looped.nodes {
            activation = node.forward(vec![activation], true);
        }
        let (loss, mut gradient) = looped.loss(Arc::unwrap_or_clone(activation), &labels);
        let mut expected = Vec::new();
        for node in looped.nodes.iter().rev() {
            if let Some(first) = node.first_key {
                expected.push((first, node.parameter_gradients(&gradient)));
            }
            if node.first_key != Some(0) {
                gradient = node.input_gradients(gradient).remove(0);
            }
        }

        let mut network = Network::new(kind, geometry, SEED).unwrap();
        let logits = network.forward(images, |_, _| Ok::<(), NetError>(())).unwrap();
        let (found, gradient) = network.loss(logits, &labels);
        assert_eq!(found.to_bits(), loss.to_bits());
        let mut made = Vec::new();
        network
            .backward(
                gradient,
                |_| false,
                |weight, gradient| -> Result<(), NetError> {
                    let LayerGradient::Dense(both) = gradient else { panic!("this layer takes no factors") };
                    made.push((weight, both));
                    Ok(())
                },
            )
            .unwrap();
        assert!(made == expected, "{kind}");
    }
}

#[test]
fn gradients_leave_from_the_last_layer_and_layers_fetch_from_the_first() {
    let geometry = Geometry { channels: 1, height: 8, width: 8, classes: 10 };
    let mut network = Network::new(NetKind::Lenet, geometry, SEED).unwrap();
    let names: Vec<&str> = network.keys().iter().map(|key| key.name.as_str()).collect();
    assert_eq!(names.len(), 8);
    assert_eq!((names[0], names[1], names[7]), ("conv1.weight", "conv1.bias", "fc2.bias"));
    assert_eq!(network.keys()[2].shape, [50, 3, 3, 20]);

    let (mut fetched, mut emitted) = (Vec::new(), Vec::new());
    let logits = network
        .forward(random_values(2 * 64, 6), |key, _| -> Result<(), NetError> {
            fetched.push(key);
            Ok(())
        })
        .unwrap();
    let (_, gradient) = network.loss(logits, &[1, 2]);
    network
        .backward(
            gradient,
            |_| false,
            |weight, _| -> Result<(), NetError> {
                emitted.push(weight);
                Ok(())
            },
        )
        .unwrap();
    assert_eq!(fetched, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(emitted, [6, 4, 2, 0]);
}

#[test]
fn factors_multiply_out_to_the_gradient() {
    let geometry = Geometry { channels: 1, height: 8, width: 8, classes: 10 };
    let images = random_values(3 * 64, 6);
    // Convolutions emit no factors, even if asked to.
    let backward = |takes_factors: bool| {
        let mut network = Network::new(NetKind::Lenet, geometry, SEED).unwrap();
        let logits = network.forward(images.clone(), |_, _| Ok::<(), NetError>(())).unwrap();
        let (_, gradient) = network.loss(logits, &[1, 2, 3]);
        let mut made = std::collections::BTreeMap::new();
        network
            .backward(
                gradient,
                |_| takes_factors,
                |weight, gradient| -> Result<(), NetError> {
                    made.insert(weight, gradient);
                    Ok(())
                },
            )
            .unwrap();
        (network.fully_connected().collect::<Vec<_>>(), made)
    };
    let (layers, dense) = backward(false);
    let (_, factored) = backward(true);
    assert_eq!(layers, [(4, [500, 200]), (6, [10, 500])]);
    for (&weight, gradient) in &dense {
        let Some(&(_, [outputs, inputs])) = layers.iter().find(|layer| layer.0 == weight) else {
            assert_eq!(factored[&weight], *gradient);
            continue;
        };
        let LayerGradient::Dense([of_weight, of_bias]) = gradient else {
            panic!("this layer takes no factors")
        };
        let LayerGradient::Factors { inputs: rows, output_gradients } = &factored[&weight] else {
            panic!("layer {weight} has factors")
        };
        let (mut product, mut sum) = (vec![0.0; outputs * inputs], vec![0.0; outputs]);
        for (row, gradients) in rows.chunks_exact(inputs).zip(output_gradients.chunks_exact(outputs)) {
            for (r, g) in gradients.iter().enumerate() {
                sum[r] += g;
                row.iter().enumerate().for_each(|(c, x)| product[r * inputs + c] += g * x);
            }
        }
        assert_close(of_weight, &product, 1e-5);
        assert_close(of_bias, &sum, 1e-5);
    }
}

#[test]
fn lent_parameters_are_used_and_keep_their_length() {
    let geometry = Geometry { channels: 1, height: 8, width: 8, classes: 10 };
    let mut network = Network::new(NetKind::Mlp, geometry, SEED).unwrap();
    let mut replacement = vec![0.25; 10 * 64];
    network.lend_parameters(4, |parameters| std::mem::swap(parameters, &mut replacement)).unwrap();
    assert_eq!(network.parameters(4), [0.25; 640]);
    let logits = network.forward(random_values(64, 7), |_, _| Ok::<(), NetError>(())).unwrap();
    assert!(logits.values().iter().all(|logit| *logit == logits.values()[0]), "{logits:?}");

    let refused = network.lend_parameters(4, |parameters| parameters.truncate(3)).unwrap_err();
    assert!(refused.to_string().contains("`fc3.weight`: expected 640 parameters, found 3"), "{refused}");
}

#[test]
fn initial_parameters_depend_on_the_seed_alone_and_have_hes_variance() {
    let geometry = Geometry { channels: 3, height: 32, width: 32, classes: 10 };
    for kind in NetKind::ALL {
        assert_eq!(kind.name().parse::<NetKind>().unwrap(), kind);
        let parameters = |seed| Network::new(kind, geometry, seed).unwrap().all_parameters();
        assert_eq!(parameters(1), parameters(1));
        assert_ne!(parameters(1), parameters(2));
        let network = Network::new(kind, geometry, 1).unwrap();
        let first = &parameters(1)[0];
        let inputs = network.keys()[0].shape[1..].iter().product::<u64>() as f32;
        let variance = first.iter().map(|value| value * value).sum::<f32>() / first.len() as f32;
        assert!((variance * inputs / 2.0 - 1.0).abs() < 0.1, "{kind}: {variance}");
        assert!(parameters(1)[1].iter().all(|&bias| bias == 0.0));
    }
}

#[test]
fn images_that_are_too_small_are_refused() {
    let geometry = Geometry { channels: 1, height: 2, width: 2, classes: 10 };
    let refused = Network::new(NetKind::Lenet, geometry, 1).unwrap_err().to_string();
    assert!(
        refused.contains("`lenet`") && refused.contains("pool2") && refused.contains("2x2x1"),
        "{refused}"
    );
    let unknown = "resnet".parse::<NetKind>().unwrap_err().to_string();
    assert!(unknown.contains("`resnet`") && unknown.contains("cifar-quick"), "{unknown}");
}

#[test]
fn a_nan_in_the_parameters_reaches_the_loss() {
    let geometry = Geometry { channels: 1, height: 8, width: 8, classes: 10 };
    let mut network = Network::new(NetKind::Lenet, geometry, SEED).unwrap();
    network.lend_parameters(0, |parameters| parameters[3] = f32::NAN).unwrap();
    assert!(loss(&mut network, &random_values(64, 8), &[0]).is_nan());
}

//! One step of a layer: the checks of the factors, the update, and the end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use paramhub_kernels::factors::Factors;
use paramhub_kernels::{convert, finite};
use paramhub_mesh::MeshError;

use super::{Inner, LayerState, UpdateCallback, lock};
use crate::error::SyncError;
use crate::layer::{FactorLayer, LayerFactors, Outputs};
use crate::message::{self, FactorMessageHeader};
use crate::parameters::Update;

impl Inner {
    /// Ends a step: every rank's factors have come, or will not.
    pub(super) fn finish(
        &self,
        layer: usize,
        arrived: Result<(), MeshError>,
        mut outputs: Outputs,
        done: UpdateCallback,
    ) {
        let outcome = arrived.map_err(SyncError::from).and_then(|()| self.update(layer, &mut outputs));
        if let Err(error) = &outcome {
            self.fail(error);
        }
        done(outcome.map(|()| outputs));
    }

    fn update(&self, layer: usize, outputs: &mut Outputs) -> Result<(), SyncError> {
        let began = Instant::now();
        let spec = &self.layers[layer];
        let mut state = lock(&self.states[layer]);
        let LayerState { parameters, messages, inputs, output_gradients, step, is_under_way } = &mut *state;
        let (rows, columns) = spec.shape;
        let mut samples = 0;
        let mut hyperparameters = None;
        for (peer, slot) in (0..).zip(messages.iter()) {
            let message = slot.take().expect("regions are dropped before their operation ends");
            let header = self.read(spec, *step, peer, &message)?;
            hyperparameters.get_or_insert(header.hyperparameters);
            let count = header.samples as usize;
            let factors = message::factors(spec, count, &message);
            convert::decode(factors.inputs, &mut inputs[samples * columns..][..count * columns], spec.codec);
            let gradients = &mut output_gradients[samples * rows..][..count * rows];
            convert::decode(factors.output_gradients, gradients, spec.codec);
            samples += count;
            slot.put(message);
        }
        let hyperparameters = hyperparameters.expect("a mesh has a rank 0");
        let update = Update {
            optimizer: &*self.optimizer,
            hyperparameters: &hyperparameters,
            contributions: self.workers,
        };
        let factors = Factors::new(
            samples,
            spec.shape,
            &inputs[..samples * columns],
            &output_gradients[..samples * rows],
        );
        parameters.update(&factors, &update, outputs);
        *step += 1;
        *is_under_way = false;
        let bytes = message::bytes(spec).expect("counted when the layer was made") as u64;
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.updates.fetch_add(1, Ordering::Relaxed);
        let took = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.rebuilding_ns.fetch_add(took, Ordering::Relaxed);
        Ok(())
    }

    /// Refuses this worker's factors if they hold a NaN or an infinity and the job rejects such gradients. They
    /// are checked before they are sent: the rank at fault is the first to know, so that it ends the job, and no
    /// other rank can leave before.
    pub(super) fn check_finite(
        &self,
        spec: &FactorLayer,
        factors: LayerFactors<'_>,
    ) -> Result<(), SyncError> {
        let both = [factors.inputs, factors.output_gradients];
        if !self.reject_non_finite
            || both.iter().all(|values| finite::first_non_finite(values, spec.codec).is_none())
        {
            return Ok(());
        }
        let (layer, key) = (Arc::clone(&spec.name), Arc::clone(&spec.key));
        let error = SyncError::NonFinite { rank: self.rank, layer, key };
        self.fail(&error);
        Err(error)
    }

    /// Ends the exchange with this error, for all ranks. The first error counts: later ones are its
    /// consequences.
    fn fail(&self, error: &SyncError) {
        let first = self.failure.get_or_init(|| error.clone());
        if let (Some(abort_handle), Some(reason)) = (&self.abort_handle, error.reason_for_hubs()) {
            abort_handle.abort(&reason);
        }
        self.mesh.abort(&first.to_string());
    }

    /// Reads a message's header and checks it against the step and the layer.
    fn read(
        &self,
        spec: &FactorLayer,
        step: u32,
        peer: u32,
        message: &[u8],
    ) -> Result<FactorMessageHeader, SyncError> {
        let disagrees = |reason: String| SyncError::Disagreement {
            rank: self.rank,
            layer: Arc::clone(&spec.name),
            peer,
            reason: reason.into(),
        };
        let header = message::read_header(message)
            .ok_or_else(|| disagrees("sent hyperparameters that are no numbers".into()))?;
        if header.step != step {
            return Err(disagrees(format!("is at step {}, this rank at {step}", header.step)));
        }
        if header.samples as usize > spec.samples {
            return Err(disagrees(format!("has {} samples, more than {}", header.samples, spec.samples)));
        }
        Ok(header)
    }
}

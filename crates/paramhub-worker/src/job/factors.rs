//! Layers whose factors go to a hub.

use paramhub_core::factors::FactorBlock;
use paramhub_core::key::Key;
use paramhub_core::requests::Request;
use paramhub_transport::{ReceiveRegion, SendRegion, StableBytes};

use super::{Job, Shared, received, sent};
use crate::command::JobCommand;
use crate::error::WorkerError;
use crate::handle::{Handle, RequestBuffers, new_request};
use crate::steps::KeyClaim;

/// One worker's factors of one step of a layer, and the buffers for its new parameters, all in the keys'
/// dtype. The factors have another if the layer's settings have a
/// [codec](paramhub_core::scheme::LayerSettings::factor_codec) for them.
///
/// For K samples of a layer with M outputs and N inputs the factors are the layer's inputs, K rows of N
/// elements, and the loss's gradient with respect to its outputs, K rows of M, in the same order of samples.
/// K may be less than the job's settings say, and 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FactorBuffers<G, P> {
    /// The layer's inputs.
    pub inputs: G,
    /// The loss's gradient with respect to the layer's outputs.
    pub output_gradients: G,
    /// The buffer for the weight: M times N elements, row by row.
    pub weight: P,
    /// The buffer for the bias: M elements. `None` where the layer has no bias.
    pub bias: Option<P>,
}

/// [`FactorBuffers`] as regions, for bindings whose buffers are neither owned nor borrowed Rust slices.
#[derive(Debug)]
pub struct FactorRegions {
    /// See [`FactorBuffers::inputs`].
    pub inputs: SendRegion,
    /// See [`FactorBuffers::output_gradients`].
    pub output_gradients: SendRegion,
    /// See [`FactorBuffers::weight`].
    pub weight: ReceiveRegion,
    /// See [`FactorBuffers::bias`].
    pub bias: Option<ReceiveRegion>,
}

/// The request of a layer's factors under way. Weight and bias end together.
#[derive(Debug)]
pub struct FactorHandle<G, P> {
    weight: Handle<(G, G), P>,
    bias: Option<Handle<(), P>>,
}

impl<G, P> FactorHandle<G, P> {
    /// Waits for the end and gives the buffers back; an error frees them.
    ///
    /// # Panics
    /// See [`Handle::wait`].
    pub fn wait(self) -> Result<FactorBuffers<G, P>, WorkerError> {
        let bias = self.bias.map(|bias| bias.wait().map(|((), bias)| bias)).transpose()?;
        let ((inputs, output_gradients), weight) = self.weight.wait()?;
        Ok(FactorBuffers { inputs, output_gradients, weight, bias })
    }

    /// Whether the request has ended, well or not.
    pub fn is_done(&self) -> bool {
        self.weight.is_done()
    }

    /// See [`Handle::on_complete`].
    pub fn on_complete(&self, callback: impl FnOnce(&Result<(), WorkerError>) + Send + 'static) {
        self.weight.on_complete(callback);
    }
}

impl Job {
    /// Contributes a layer's factors to the next step of its weight and its bias. Receives the parameters
    /// updated by the sum of all workers' outer products, or the mean or sum of those products where the job
    /// has no optimizer. `weight` is the key of the layer's weight; the layer's scheme must be
    /// [`Scheme::FactorsToHub`](paramhub_core::scheme::Scheme::FactorsToHub).
    ///
    /// As with gradients, the mean divides by the number of workers. For the mean over all samples, divide
    /// the output gradients by the number of this worker's samples.
    ///
    /// # Errors
    /// If the key is no such weight, a length does not fit, or a request of the weight or the bias is under
    /// way.
    pub fn push_pull_factors<G: StableBytes, P: StableBytes>(
        &self,
        weight: u32,
        buffers: FactorBuffers<G, P>,
    ) -> Result<FactorHandle<G, P>, WorkerError> {
        let regions = FactorRegions {
            inputs: SendRegion::owned(buffers.inputs),
            output_gradients: SendRegion::owned(buffers.output_gradients),
            weight: ReceiveRegion::owned(buffers.weight),
            bias: buffers.bias.map(ReceiveRegion::owned),
        };
        let of_weight = |mut buffers: RequestBuffers| {
            let output_gradients = RequestBuffers {
                send: buffers.output_gradients.take().map(|region| *region),
                ..RequestBuffers::default()
            };
            let inputs = RequestBuffers { send: buffers.send.take(), ..RequestBuffers::default() };
            ((sent(inputs), sent(output_gradients)), received(buffers))
        };
        self.shared.submit_factors(weight, regions, true, of_weight, |buffers| ((), received(buffers)))
    }

    /// [`push_pull_factors`](Self::push_pull_factors) over regions. They are dropped when the request ends,
    /// before its handle or a callback reports the end.
    pub fn submit_factors(
        &self,
        weight: u32,
        regions: FactorRegions,
    ) -> Result<FactorHandle<(), ()>, WorkerError> {
        self.shared.submit_factors(weight, regions, false, |_| (((), ()), ()), |_| ((), ()))
    }
}

impl Shared {
    /// Checks a layer's request, claims its keys and hands it to the I/O thread.
    pub(crate) fn submit_factors<G, P>(
        &self,
        weight: u32,
        regions: FactorRegions,
        keep: bool,
        of_weight: fn(RequestBuffers) -> ((G, G), P),
        of_bias: fn(RequestBuffers) -> ((), P),
    ) -> Result<FactorHandle<G, P>, WorkerError> {
        let key = self.find(weight)?;
        let number = self.blocks.iter().position(|block| block.weight == weight);
        let Some((number, block)) = number.map(|number| (number, self.blocks[number])) else {
            return Err(self.misused(format!(
                "key {key}: it is no weight of a layer that goes by factors-to-hub: push its gradient, or ask for that scheme in \
                 the job's settings"
            )));
        };
        let samples = self.check_factors(key, &block, &regions)?;
        if regions.bias.is_some() != block.bias.is_some() {
            let has = if block.bias.is_some() { "a bias" } else { "no bias" };
            return Err(self.misused(format!("key {key}: its layer has {has}: give room for what it has")));
        }
        let (claim, bias_claim) = self.claim_layer(&block)?;
        let undo = || {
            self.steps.undo(weight, claim);
            if let (Some(bias), Some(claim)) = (block.bias, bias_claim) {
                self.steps.undo(bias, claim);
            }
        };
        let receive = [(Some(weight), Some(regions.weight)), (block.bias, regions.bias)];
        let mut buffers = [RequestBuffers::default(), RequestBuffers::default()];
        for (buffers, (key, receive)) in buffers.iter_mut().zip(receive) {
            let Some((key, receive)) = key.zip(receive) else { continue };
            if let Err(error) = self.claim_place(key, &receive, buffers) {
                undo();
                return Err(error);
            }
            buffers.receive = Some(receive);
        }
        let [weight_buffers, bias_buffers] = buffers;
        let weight_buffers = RequestBuffers {
            send: Some(regions.inputs),
            output_gradients: Some(Box::new(regions.output_gradients)),
            ..weight_buffers
        };
        let new_request = || new_request(keep, WorkerError::Left { who: self.who.clone() });
        let (weight_ticket, completion) = new_request();
        let (bias_ticket, bias) = block.bias.map(|_| new_request()).unzip();
        let command = JobCommand::Factors {
            block: number,
            samples,
            step: claim.step,
            weight: Box::new((weight_buffers, weight_ticket)),
            bias: bias_ticket.map(|ticket| Box::new((bias_buffers, ticket))),
        };
        if let Err(error) = self.inbox.put(command) {
            undo();
            return Err(error);
        }
        Ok(FactorHandle {
            weight: Handle::new(completion, of_weight),
            bias: bias.map(|completion| Handle::new(completion, of_bias)),
        })
    }

    /// The number of samples in the regions, if the lengths fit the layer and one another.
    fn check_factors(
        &self,
        key: &Key,
        block: &FactorBlock,
        regions: &FactorRegions,
    ) -> Result<u32, WorkerError> {
        let bytes = block.codec.bytes();
        let (inputs, gradients) = (regions.inputs.bytes().len(), regions.output_gradients.bytes().len());
        let samples = inputs / (block.inputs * bytes);
        let fits = samples * block.inputs * bytes == inputs && samples * block.outputs * bytes == gradients;
        if !fits || samples > block.samples as usize {
            return Err(self.misused(format!(
                "key {key}: its layer takes K rows of {} inputs and K rows of {} output gradients in {}, K being {} at most, but \
                 {inputs} and {gradients} bytes were given",
                block.inputs, block.outputs, block.codec, block.samples
            )));
        }
        let expected = [(block.outputs * block.inputs, "parameters"), (block.outputs, "bias")];
        for (region, (elements, buffer)) in
            [Some(&regions.weight), regions.bias.as_ref()].iter().zip(expected)
        {
            let expected_bytes = (elements * key.dtype.bytes()) as u64;
            if let Some(got_bytes) =
                region.map(|region| region.bytes().len()).filter(|&got| got as u64 != expected_bytes)
            {
                let (who, key) = (self.who.clone(), key.to_string().into());
                return Err(WorkerError::Length { who, key, buffer, expected_bytes, got_bytes });
            }
        }
        Ok(samples as u32)
    }

    fn claim_layer(&self, block: &FactorBlock) -> Result<(KeyClaim, Option<KeyClaim>), WorkerError> {
        let claim = |key: u32| {
            self.steps.claim(key, Request::Factors, 0).map_err(|request| WorkerError::KeyBusy {
                who: self.who.clone(),
                key: self.settings.keys.keys()[key as usize].to_string().into(),
                request,
            })
        };
        let weight = claim(block.weight)?;
        let bias =
            block.bias.map(claim).transpose().inspect_err(|_| self.steps.undo(block.weight, weight))?;
        if let (Some(key), Some(bias)) = (block.bias, bias)
            && bias.step != weight.step
        {
            self.steps.undo(key, bias);
            self.steps.undo(block.weight, weight);
            return Err(self.misused(format!(
                "key {key} is at step {} and the weight it belongs to at step {}: begin both with one version",
                bias.step, weight.step
            )));
        }
        Ok((weight, bias))
    }

    /// Claims the place in the arena that a key's parameters pass through.
    fn claim_place(
        &self,
        key: u32,
        receive: &ReceiveRegion,
        buffers: &mut RequestBuffers,
    ) -> Result<(), WorkerError> {
        let Some(arena) = &self.arena else { return Ok(()) };
        let claims = arena.claim(key, Request::Factors, None, Some(receive.bytes()));
        buffers.claims = claims.ok_or_else(|| {
            self.misused(format!(
                "key {key}: a tensor was given out for memory this request would pass through: exchange that tensor, or drop it"
            ))
        })?;
        Ok(())
    }
}

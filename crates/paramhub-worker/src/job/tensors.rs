//! Memory of a job from which and into which tensors are exchanged without a copy.

use std::ops::Range;

use paramhub_transport::shm::{SharedTensor, Tensor};

use super::{Job, Shared};
use crate::arena::{NotContiguous, WorkerArena};
use crate::error::WorkerError;

impl Job {
    /// Memory for a key's gradient, from which it is exchanged without a copy in this process: in the arena
    /// shared with a hub on this host, or else on the heap. Pass it wherever a method takes a buffer;
    /// dropping it gives the memory back.
    ///
    /// # Errors
    /// [`WorkerError::Misused`] where an earlier tensor of the key still lives.
    pub fn gradient_tensor(&self, key: u32) -> Result<Tensor, WorkerError> {
        // A gradient that travels in another encoding is converted into the arena, so a tensor there would
        // save no copy.
        let named = self.shared.find(key)?;
        let is_as_sent = self.settings().codec_of(named) == named.dtype.codec();
        self.tensor(key, "gradient", |arena| arena.gradient(key), is_as_sent)
    }

    /// Memory for a key's parameters, into which they are received without a copy in this process; otherwise
    /// like [`gradient_tensor`](Self::gradient_tensor).
    pub fn parameter_tensor(&self, key: u32) -> Result<Tensor, WorkerError> {
        self.tensor(key, "parameters", |arena| arena.parameters(key), true)
    }

    /// One [`gradient_tensor`](Self::gradient_tensor) for several neighbouring keys, in table order. Over
    /// shared memory it requires [`Settings::packed`](paramhub_core::settings::Settings::packed).
    ///
    /// # Errors
    /// [`WorkerError::Misused`] where there is no such key, an earlier tensor of a key still lives, or the
    /// keys do not lie back to back.
    pub fn gradient_tensors(&self, keys: Range<u32>) -> Result<Tensor, WorkerError> {
        let bytes = self.shared.run_bytes(&keys)?;
        let is_as_sent = keys.clone().all(|key| {
            let named = &self.settings().keys.keys()[key as usize];
            self.settings().codec_of(named) == named.dtype.codec()
        });
        match self.shared.arena.as_ref().filter(|_| is_as_sent) {
            None => Ok(Tensor::on_heap(bytes)),
            Some(arena) => self.shared.taken(&keys, arena.gradients(keys.clone())),
        }
    }

    /// One [`parameter_tensor`](Self::parameter_tensor) for several neighbouring keys.
    ///
    /// # Errors
    /// See [`gradient_tensors`](Self::gradient_tensors).
    pub fn parameter_tensors(&self, keys: Range<u32>) -> Result<Tensor, WorkerError> {
        let bytes = self.shared.run_bytes(&keys)?;
        match &self.shared.arena {
            None => Ok(Tensor::on_heap(bytes)),
            Some(arena) => self.shared.taken(&keys, arena.parameters_of(keys.clone())),
        }
    }

    /// The [`shared_parameters`](Self::shared_parameters) of several neighbouring keys as one tensor.
    ///
    /// # Errors
    /// As [`gradient_tensors`](Self::gradient_tensors), and where this worker shares no parameters.
    pub fn shared_parameters_of(&self, keys: Range<u32>) -> Result<SharedTensor, WorkerError> {
        self.shared.run_bytes(&keys)?;
        self.shared.check_shares_parameters()?;
        let arena = self.shared.arena.as_ref().expect("shared parameters lie in shared memory");
        self.shared.taken(&keys, arena.shared_parameters_of(keys.clone()))
    }

    fn tensor(
        &self,
        key: u32,
        what: &str,
        take: impl Fn(&WorkerArena) -> Option<Tensor>,
        is_in_arena: bool,
    ) -> Result<Tensor, WorkerError> {
        let named = self.shared.find(key)?;
        let bytes = named.elements().unwrap_or(0) as usize * named.dtype.bytes();
        match self.shared.arena.as_ref().filter(|_| is_in_arena) {
            None => Ok(Tensor::on_heap(bytes)),
            Some(arena) => take(arena).ok_or_else(|| {
                self.shared.misused(format!("key {named}: the memory for its {what} is given out already"))
            }),
        }
    }

    /// Whether this worker reads the one copy of the parameters that its host's workers share.
    pub fn shares_parameters(&self) -> bool {
        self.shared.check_shares_parameters().is_ok()
    }

    /// Whether any of this job's streams is over shared memory.
    pub fn shares_memory(&self) -> bool {
        self.shared.arena.is_some()
    }

    /// A key's parameters in the one copy that all workers of this host read, where
    /// [`Options::shared_parameters`](crate::Options::shared_parameters) asked for it. They are valid from
    /// the end of [`push_pull_shared`](Self::push_pull_shared) until this worker pushes the key's next
    /// gradient: when the last worker has pushed it, the hub overwrites them, even if a worker still reads them.
    pub fn shared_parameters(&self, key: u32) -> Result<SharedTensor, WorkerError> {
        self.shared.find(key)?;
        self.shared.check_shares_parameters()?;
        let arena = self.shared.arena.as_ref().expect("shared parameters lie in shared memory");
        Ok(arena.shared_parameters(key).expect("it was just looked for"))
    }
}

impl Shared {
    /// The bytes of neighbouring keys in this process's memory.
    fn run_bytes(&self, keys: &Range<u32>) -> Result<usize, WorkerError> {
        if keys.is_empty() {
            return Err(self.misused(format!("keys {keys:?} are none: ask for the memory of at least one")));
        }
        let mut bytes = 0;
        for key in keys.clone() {
            let key = self.find(key)?;
            bytes += key.elements().unwrap_or(0) as usize * key.dtype.bytes();
        }
        Ok(bytes)
    }

    /// Turns an arena's answer to a request for several keys into a result.
    fn taken<T>(
        &self,
        keys: &Range<u32>,
        answer: Result<Option<T>, NotContiguous>,
    ) -> Result<T, WorkerError> {
        match answer {
            Ok(Some(tensor)) => Ok(tensor),
            Ok(None) => Err(self.misused(format!("keys {keys:?}: some of their memory is given out already"))),
            Err(NotContiguous(key)) => Err(self.misused(format!(
                "keys {keys:?}: key {key} does not lie behind the one before it: ask for packed tensors in the settings, \
                 and for keys of one type"
            ))),
        }
    }

    pub(crate) fn check_shares_parameters(&self) -> Result<(), WorkerError> {
        if self.arena.as_ref().is_some_and(|arena| arena.common.is_some()) {
            return Ok(());
        }
        Err(self
            .misused("this worker shares no parameters: ask for them in the options it joins with".into()))
    }
}

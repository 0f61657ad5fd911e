//! Memory of a job's that is exchanged where it lies.

use std::ops::Range;

use paramhub_transport::shm::{SharedTensor, Tensor};

use super::{Job, Shared};
use crate::arena::{Apart, WorkerArena};
use crate::error::WorkerError;

impl Job {
    /// Memory for a key's gradient from which it is exchanged without a copy of this process: in the arena that a hub on this
    /// host shares, or on the heap. Use it wherever a buffer is asked for; dropping it gives it back.
    ///
    /// # Errors
    /// [`WorkerError::Misplaced`] where an earlier one still lives.
    pub fn gradient_tensor(&self, key: u32) -> Result<Tensor, WorkerError> {
        // A gradient that travels in another encoding is converted into the arena, and so is not exchanged from there.
        let named = self.shared.find(key)?;
        let is_as_sent = self.settings().codec_of(named) == named.dtype.codec();
        self.tensor(key, "gradient", |arena| arena.gradient(key), is_as_sent)
    }

    /// Memory for a key's parameters that they are received into without a copy of this process; otherwise as
    /// [`gradient_tensor`](Self::gradient_tensor).
    pub fn parameter_tensor(&self, key: u32) -> Result<Tensor, WorkerError> {
        self.tensor(key, "parameters", |arena| arena.parameters(key), true)
    }

    /// [`gradient_tensor`](Self::gradient_tensor) of several neighbouring keys as one, in table order: over shared memory that
    /// takes [`Settings::packed`](paramhub_core::settings::Settings::packed).
    ///
    /// # Errors
    /// [`WorkerError::Misplaced`] where there is no key, an earlier tensor of one still lives, or they do not lie back to back.
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

    /// [`parameter_tensor`](Self::parameter_tensor) of several neighbouring keys as one.
    ///
    /// # Errors
    /// As [`gradient_tensors`](Self::gradient_tensors).
    pub fn parameter_tensors(&self, keys: Range<u32>) -> Result<Tensor, WorkerError> {
        let bytes = self.shared.run_bytes(&keys)?;
        match &self.shared.arena {
            None => Ok(Tensor::on_heap(bytes)),
            Some(arena) => self.shared.taken(&keys, arena.parameters_of(keys.clone())),
        }
    }

    /// [`shared_parameters`](Self::shared_parameters) of several neighbouring keys as one.
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
                self.shared.misplaced(format!("key {named}: the memory for its {what} is given out already"))
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
    /// [`Options::shared_parameters`](crate::Options::shared_parameters) asked for it. They are right from the end of
    /// [`push_pull_shared`](Self::push_pull_shared) until this worker pushes the key's next gradient: the hub overwrites them
    /// when the last worker has, whoever still reads.
    pub fn shared_parameters(&self, key: u32) -> Result<SharedTensor, WorkerError> {
        self.shared.find(key)?;
        self.shared.check_shares_parameters()?;
        let arena = self.shared.arena.as_ref().expect("shared parameters lie in shared memory");
        Ok(arena.shared_parameters(key).expect("it was just looked for"))
    }
}

impl Shared {
    /// Bytes of neighbouring keys in this process's memory.
    fn run_bytes(&self, keys: &Range<u32>) -> Result<usize, WorkerError> {
        if keys.is_empty() {
            return Err(self.misplaced(format!("keys {keys:?} are none: ask for the memory of at least one")));
        }
        let mut bytes = 0;
        for key in keys.clone() {
            let key = self.find(key)?;
            bytes += key.elements().unwrap_or(0) as usize * key.dtype.bytes();
        }
        Ok(bytes)
    }

    /// What an arena has answered to a request for several keys.
    fn taken<T>(&self, keys: &Range<u32>, answer: Result<Option<T>, Apart>) -> Result<T, WorkerError> {
        match answer {
            Ok(Some(tensor)) => Ok(tensor),
            Ok(None) => Err(self.misplaced(format!("keys {keys:?}: some of their memory is given out already"))),
            Err(Apart(key)) => Err(self.misplaced(format!(
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
            .misplaced("this worker shares no parameters: ask for them in the options it joins with".into()))
    }
}

//! The functions that a worker's program can run, by name.
//!
//! Does not run them; `super::runner` does.
//!
//! *Invariant:* a name stands for one function.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::objects::{Consumer, Pinned, Store};
use cuda_cluster_data::cuda::Device;
use cuda_cluster_data::ucx::Buffer;
use cuda_cluster_wire::numbers::{self, Number};
use cuda_cluster_wire::tasks::ObjectId;
use cuda_cluster_wire::value;

/// Why a function did not succeed; its text reaches the client.
pub type FunctionError = Box<dyn std::error::Error + Send + Sync>;

type Function =
    Arc<dyn Fn(&Context<'_>, &[Input]) -> Result<Outputs, FunctionError> + Send + Sync + 'static>;

/// The functions of a program.
#[derive(Clone, Default)]
pub struct Registry {
    functions: BTreeMap<String, Function>,
}

impl Registry {
    /// A registry without functions.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a function; it replaces an earlier one of that name.
    pub fn add<R: Into<Outputs>>(
        &mut self,
        name: impl Into<String>,
        function: impl Fn(&Context<'_>, &[Input]) -> Result<R, FunctionError> + Send + Sync + 'static,
    ) -> &mut Self {
        let function = move |context: &Context<'_>, inputs: &[Input]| {
            function(context, inputs).map(Into::into)
        };
        self.functions.insert(name.into(), Arc::new(function));
        self
    }

    pub(super) fn find(&self, name: &str) -> Option<&Function> {
        self.functions.get(name)
    }
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.functions.keys()).finish()
    }
}

/// What a running function can access of its worker.
pub struct Context<'a> {
    pub(super) task: ObjectId,
    pub(super) worker: &'a str,
    pub(super) arguments: &'a [u8],
    pub(super) store: &'a Store,
    pub(super) consumer: &'a Consumer,
    pub(super) cancelled: &'a AtomicBool,
}

/// Why a function ended early: its task was cancelled, or all its outputs were released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the task was cancelled")]
pub struct Cancelled;

impl Context<'_> {
    /// The task's name.
    pub fn task(&self) -> ObjectId {
        self.task
    }

    /// The worker's name.
    pub fn worker(&self) -> &str {
        self.worker
    }

    /// The arguments from the client.
    ///
    /// # Errors
    /// If they are of another type; a number may be read as one of another type that is exactly
    /// the same.
    pub fn arguments<T: DeserializeOwned>(&self) -> Result<T, FunctionError> {
        Ok(value::decode(self.arguments)?)
    }

    /// Whether the task was cancelled, or all its outputs were released, while it runs. A function
    /// that takes long asks now and then, and returns early: its thread can't be ended otherwise.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// For `?` in a loop: an error as soon as [`Self::is_cancelled`].
    ///
    /// # Errors
    /// If nobody wants the result any more.
    pub fn end_if_cancelled(&self) -> Result<(), Cancelled> {
        if self.is_cancelled() { Err(Cancelled) } else { Ok(()) }
    }

    /// The worker's device, if it has one.
    pub fn device(&self) -> Option<&Device> {
        self.store.device()
    }

    /// Memory of the device, or of the host if there is no device, for this task to write and
    /// return. Its content is undefined. Objects that are not in use make room.
    ///
    /// # Errors
    /// If there is no room.
    pub fn allocate(&self, bytes: usize) -> Result<Buffer, FunctionError> {
        Ok(self.store.allocate(self.consumer, bytes)?)
    }

    /// Host memory for this task to write and return, as [`Self::allocate`] gives of the device.
    /// From 1 MiB on, workers that fetch it read it where it is instead of copying it.
    ///
    /// # Errors
    /// If there is no room.
    pub fn allocate_on_host(&self, bytes: usize) -> Result<Buffer, FunctionError> {
        Ok(self.store.allocate_on_host(self.consumer, bytes)?)
    }

    /// Memory like that of [`Self::allocate`], filled by `write`: in place if the host can write to
    /// it, which saves a copy; otherwise in host memory first. `write` gets undefined bytes.
    ///
    /// # Errors
    /// If there is no room, or the device refuses the copy.
    pub fn fill(
        &self,
        bytes: usize,
        write: impl FnOnce(&mut [u8]),
    ) -> Result<Buffer, FunctionError> {
        let mut buffer = self.allocate(bytes)?;
        if let Some(memory) = buffer.host_mut() {
            write(memory);
        } else {
            let mut staging = Buffer::undefined(bytes).ok_or("there is no host memory")?;
            let memory = staging.host_mut().unwrap_or_default();
            write(memory);
            buffer.write_at(0, memory)?;
        }
        Ok(buffer)
    }

    /// Like [`Self::fill`], with memory for this many numbers.
    ///
    /// # Errors
    /// As there.
    pub fn fill_numbers<N: Number>(
        &self,
        count: usize,
        write: impl FnOnce(&mut [N]),
    ) -> Result<Buffer, FunctionError> {
        let bytes =
            count.checked_mul(size_of::<N>()).ok_or("more bytes than there are addresses")?;
        let mut buffer = self.allocate(bytes)?;
        if let Some(room) = buffer.host_mut().and_then(numbers::in_place) {
            write(room);
        } else {
            let mut staging = vec![N::default(); count];
            write(&mut staging);
            buffer.write_at(0, numbers::bytes(&staging))?;
        }
        Ok(buffer)
    }

    /// A copy of `numbers` in memory like that of [`Self::allocate`].
    ///
    /// # Errors
    /// If there is no room, or the device refuses the copy.
    pub fn place_numbers<N: Number>(&self, numbers: &[N]) -> Result<Buffer, FunctionError> {
        self.place(numbers::bytes(numbers))
    }

    /// A copy of `bytes` in memory like that of [`Self::allocate`].
    ///
    /// # Errors
    /// If there is no room, or the device refuses the copy.
    pub fn place(&self, bytes: &[u8]) -> Result<Buffer, FunctionError> {
        let mut buffer = self.allocate(bytes.len())?;
        buffer.write_at(0, bytes)?;
        Ok(buffer)
    }
}

/// An input of a task. It stays in place while the task runs.
pub struct Input(pub(super) InputKind);

pub(super) enum InputKind {
    Inline(Buffer),
    Stored(Pinned),
}

impl Input {
    /// The memory, of the host or of the device: where the object is.
    pub fn buffer(&self) -> &Buffer {
        match &self.0 {
            InputKind::Inline(buffer) => buffer,
            InputKind::Stored(pinned) => pinned.buffer(),
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.buffer().len()
    }

    /// Whether its length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes, for reading on the host: in place if possible, otherwise a copy.
    ///
    /// # Errors
    /// If the device refuses the copy.
    pub fn bytes(&self) -> Result<Cow<'_, [u8]>, FunctionError> {
        match self.buffer().host() {
            Some(bytes) => Ok(bytes.into()),
            None => {
                let mut copy = vec![0; self.len()];
                self.buffer().read(0, &mut copy)?;
                Ok(copy.into())
            }
        }
    }

    /// The input as numbers, such as `&[f32]`: in place if possible, otherwise a copy.
    ///
    /// # Errors
    /// If its length is not that of whole numbers, or the device refuses the copy.
    pub fn numbers<N: Number>(&self) -> Result<Cow<'_, [N]>, FunctionError> {
        Ok(match self.bytes()? {
            Cow::Borrowed(bytes) => numbers::read(bytes)?,
            Cow::Owned(bytes) => numbers::read(&bytes)?.into_owned().into(),
        })
    }

    /// Decodes the input as a value.
    ///
    /// # Errors
    /// If it is not a value of this type.
    pub fn value<T: DeserializeOwned>(&self) -> Result<T, FunctionError> {
        Ok(value::decode(&self.bytes()?)?)
    }
}

/// What a function returns: its task's outputs, in order.
#[derive(Debug, Default)]
pub struct Outputs(pub(super) Vec<Buffer>);

impl Outputs {
    /// One output: a value.
    ///
    /// # Errors
    /// If the value cannot be encoded.
    pub fn value(value: &impl Serialize) -> Result<Self, FunctionError> {
        Ok(value::encode(value)?.into())
    }
}

impl From<()> for Outputs {
    fn from((): ()) -> Self {
        // What `value::encode(&())` returns.
        Vec::<u8>::new().into()
    }
}

impl From<Vec<u8>> for Outputs {
    fn from(bytes: Vec<u8>) -> Self {
        Buffer::from(bytes).into()
    }
}

impl From<Buffer> for Outputs {
    fn from(buffer: Buffer) -> Self {
        Outputs(vec![buffer])
    }
}

impl From<Vec<Buffer>> for Outputs {
    fn from(buffers: Vec<Buffer>) -> Self {
        Outputs(buffers)
    }
}

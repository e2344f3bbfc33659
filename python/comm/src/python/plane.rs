//! Memory over UCX, as Python sees it.
//!
//! *Invariant:* memory that UCX may use is kept until UCX is done with it, whatever
//! Python does.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyConnectionError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use super::{Connection, Events, Memory};
use crate::engine::Engine;
use crate::plane::{self, Key, Place, Plane, Range};

/// An object with memory: on a device, with address, length in bytes and stream as in
/// `__cuda_array_interface__`; or in a buffer.
type Given = (Py<PyAny>, Option<(u64, usize, Option<u64>)>);

/// UCX's version, what it has opened, why it does not move device memory, and a warning, if other
/// users can end this process.
type Opened = (String, Vec<String>, Option<String>, Option<String>);

/// What keeps memory where it is.
#[expect(dead_code, reason = "held until UCX is done with it")]
enum Keeper {
    Object(Py<PyAny>),
    Buffer(PyUntypedBuffer),
}

/// What keeps the memory that a transfer uses.
type Kept = (Arc<plane::Transfer>, Vec<Keeper>);

/// Memory on its way to a peer, or from one.
#[pyclass(frozen, module = "cuda_cluster._comm")]
pub(super) struct Transfer {
    transfer: Arc<plane::Transfer>,
    engine: &'static Engine,
    /// Left to [`LEFT`] if this is dropped too early.
    keepers: Mutex<Vec<Keeper>>,
}

/// Memory whose transfers nobody waits for, and that UCX may still use.
static LEFT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

/// Whether the calling thread has a CUDA context.
#[pyfunction]
pub(super) fn has_context() -> bool {
    plane::has_context()
}

/// This process's key, for those whom it lets in: they seal addresses of UCX with it.
#[pyfunction]
pub(super) fn plane_key() -> PyResult<Key> {
    Ok(Engine::of_this_process()?.plane_key)
}

/// Opens UCX, once a process. It moves device memory if the calling thread has a CUDA context.
#[pyfunction]
#[pyo3(signature = (library=None))]
pub(super) fn open_plane(py: Python<'_>, library: Option<PathBuf>) -> PyResult<Opened> {
    let engine = Engine::of_this_process()?;
    let plane = py.detach(|| engine.plane(library.as_deref())).map_err(PyRuntimeError::new_err)?;
    let (library, exposed) = (plane.library().to_owned(), plane.exposed().map(str::to_owned));
    Ok((library, plane.transports().to_vec(), plane.devices().err(), exposed))
}

/// Where a peer asks for what this process offers, sealed with the peer's key.
#[pyfunction]
pub(super) fn address_for(peer: Key) -> PyResult<Vec<u8>> {
    let plane = Engine::of_this_process()?.opened_plane();
    let plane = plane.ok_or_else(|| PyConnectionError::new_err("UCX is not open"))?;
    Ok(plane.address_for(&peer))
}

/// Bytes of host and of device memory that this process has fetched.
#[pyfunction]
pub(super) fn fetched() -> PyResult<[u64; 2]> {
    Ok(Engine::of_this_process()?.opened_plane().map_or([0; 2], Plane::fetched))
}

/// Memory to fetch into, of the pool.
#[pyfunction]
pub(super) fn memory(len: usize) -> PyResult<Memory> {
    Ok(Memory { block: Engine::of_this_process()?.take(len)? })
}

/// Offers memory to the peer of a connection, which asks for it by the transfer's number.
#[pyfunction]
pub(super) fn offer(
    py: Python<'_>,
    connection: &Connection,
    events: &Events,
    frames: Vec<Given>,
) -> PyResult<Transfer> {
    begin(py, connection, frames, |plane, ranges| {
        // SAFETY: the keepers hold the memory until the transfer is released, and with it its stream:
        // whoever exports one keeps it as long as the object (CUDA Array Interface, version 3).
        // Nobody changes what is being sent: the promise of who sends it, as over sockets.
        Ok(unsafe { plane.offer(ranges, &events.completions) })
    })
}

/// Fills memory, which nobody else uses yet, with what a process offers under a number: the one with
/// this key and this address, which it has sealed for us.
#[pyfunction]
pub(super) fn fetch(
    py: Python<'_>,
    connection: &Connection,
    events: &Events,
    from: Vec<u8>,
    key: Key,
    offer: u64,
    frames: Vec<Given>,
) -> PyResult<Transfer> {
    if frames
        .iter()
        .any(|(object, on_device)| on_device.is_none() && object.bind(py).cast::<Memory>().is_err())
    {
        return Err(PyBufferError::new_err("only memory of the pool is filled"));
    }
    begin(py, connection, frames, |plane, ranges| {
        // SAFETY: as in `offer`; the caller has just allocated them.
        let transfer = unsafe { plane.fetch(&from, key, offer, ranges, &events.completions) };
        transfer.map_err(|error| PyValueError::new_err(error.to_string()))
    })
}

fn begin(
    py: Python<'_>,
    connection: &Connection,
    frames: Vec<Given>,
    begin: impl FnOnce(&Plane, Vec<Range>) -> PyResult<Arc<plane::Transfer>>,
) -> PyResult<Transfer> {
    let here = connection.here()?;
    let Some(plane) = connection.engine.opened_plane() else {
        return Err(PyConnectionError::new_err("UCX is not open"));
    };
    let (over, kept): (Vec<Kept>, Vec<Kept>) =
        std::mem::take(&mut *left()).into_iter().partition(|(transfer, _)| transfer.is_released());
    left().extend(kept);
    // Whatever they do when they are freed happens while nothing is locked.
    drop(over);
    let frames: Vec<(Range, Keeper)> =
        frames.into_iter().map(|given| range(py, given)).collect::<PyResult<_>>()?;
    let (ranges, keepers) = frames.into_iter().unzip();
    let transfer = begin(plane, ranges)?;
    here.attach(&transfer);
    Ok(Transfer { transfer, engine: connection.engine, keepers: Mutex::new(keepers) })
}

fn range(py: Python<'_>, (object, on_device): Given) -> PyResult<(Range, Keeper)> {
    if let Some((address, len, stream)) = on_device {
        return Ok((
            Range { place: Place::Device { address, stream }, len },
            Keeper::Object(object),
        ));
    }
    let buffer = PyUntypedBuffer::get(object.bind(py))?;
    if !buffer.is_c_contiguous() {
        return Err(PyBufferError::new_err("a frame is not contiguous"));
    }
    let place = Place::Host(buffer.buf_ptr().expose_provenance());
    Ok((Range { place, len: buffer.len_bytes() }, Keeper::Buffer(buffer)))
}

fn left() -> MutexGuard<'static, Vec<Kept>> {
    LEFT.lock().unwrap_or_else(PoisonError::into_inner)
}

#[pymethods]
impl Transfer {
    /// The number of its event, and of an offer.
    #[getter]
    fn id(&self) -> u64 {
        self.transfer.id()
    }

    /// UCX's lanes that have carried it, once it has ended.
    #[getter]
    fn lanes(&self) -> Vec<String> {
        self.transfer.lanes().to_vec()
    }

    /// Whether it has ended; why it has failed is raised.
    #[getter]
    fn done(&self) -> PyResult<bool> {
        match self.transfer.outcome() {
            None => Ok(false),
            Some(Ok(())) => Ok(true),
            Some(Err(why)) => Err(PyConnectionError::new_err(why)),
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if self.transfer.is_released() {
            return;
        }
        if self.engine.is_alive_here()
            && let Some(plane) = self.engine.opened_plane()
        {
            plane.give_up(&self.transfer, "nobody waits for it any more");
        }
        let keepers = self.keepers.get_mut().unwrap_or_else(PoisonError::into_inner);
        let keepers = std::mem::take(keepers);
        left().push((Arc::clone(&self.transfer), keepers));
    }
}

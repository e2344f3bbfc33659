//! Device memory, as Python sees it.
//!
//! *Invariant:* an object whose memory UCX may use is kept until UCX is done with it, whatever
//! Python does.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::{PyConnectionError, PyRuntimeError};
use pyo3::prelude::*;

use super::{Connection, Events};
use crate::device::{self, Plane, Range};
use crate::engine::Engine;

/// Address on the device, length in bytes, and stream, as in `__cuda_array_interface__`.
type Place = (u64, usize, Option<u64>);

/// Objects with memory that a transfer uses.
type Kept = (Arc<device::Transfer>, Vec<Py<PyAny>>);

/// Device memory on its way to a peer, or from one.
#[pyclass(frozen, module = "cuda_cluster._comm")]
pub(super) struct Transfer {
    transfer: Arc<device::Transfer>,
    engine: &'static Engine,
    /// Left to [`LEFT`] if this is dropped too early.
    objects: Mutex<Vec<Py<PyAny>>>,
}

/// Objects whose transfers nobody waits for, and that UCX may still use.
static LEFT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

/// Whether the calling thread has a CUDA context.
#[pyfunction]
pub(super) fn has_context() -> bool {
    device::has_context()
}

/// Opens UCX for device memory, once a process: the address that peers need, and what was opened. The
/// calling thread needs a CUDA context.
#[pyfunction]
#[pyo3(signature = (library=None))]
pub(super) fn open_devices(
    py: Python<'_>,
    library: Option<PathBuf>,
) -> PyResult<(Vec<u8>, String)> {
    let engine = Engine::of_this_process()?;
    let plane = py.detach(|| engine.plane(library.as_deref())).map_err(PyRuntimeError::new_err)?;
    Ok((plane.address().to_vec(), plane.library().to_owned()))
}

/// Bytes of device memory that this process has fetched.
#[pyfunction]
pub(super) fn fetched_devices() -> PyResult<u64> {
    Ok(Engine::of_this_process()?.opened_plane().map_or(0, Plane::fetched))
}

/// The lanes of UCX's connection to the process at an address; none before the first fetch.
#[pyfunction]
pub(super) fn device_lanes(of: &[u8]) -> PyResult<Vec<String>> {
    let plane = Engine::of_this_process()?.opened_plane();
    Ok(plane.map_or_else(Vec::new, |plane| plane.lanes(of)))
}

/// Offers device memory to the peer of a connection, which asks for it by the transfer's number.
/// `objects` own the memory.
#[pyfunction]
pub(super) fn offer_devices(
    connection: &Connection,
    events: &Events,
    places: Vec<Place>,
    objects: Vec<Py<PyAny>>,
) -> PyResult<Transfer> {
    begin(connection, objects, |plane| {
        // SAFETY: the objects own the memory, and are kept until the transfer is released. Nobody
        // changes what is being sent: the promise of who sends it, as with host memory.
        unsafe { plane.offer(ranges(places), &events.completions) }
    })
}

/// Fills device memory with what the process at an address offers under a number. `objects` own the
/// memory, which nobody else uses yet.
#[pyfunction]
pub(super) fn fetch_devices(
    connection: &Connection,
    events: &Events,
    from: Vec<u8>,
    offer: u64,
    places: Vec<Place>,
    objects: Vec<Py<PyAny>>,
) -> PyResult<Transfer> {
    begin(connection, objects, |plane| {
        // SAFETY: as in `offer_devices`; the caller has just allocated them.
        unsafe { plane.fetch(&from, offer, ranges(places), &events.completions) }
    })
}

fn begin(
    connection: &Connection,
    objects: Vec<Py<PyAny>>,
    begin: impl FnOnce(&Plane) -> Arc<device::Transfer>,
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
    let transfer = begin(plane);
    here.attach(&transfer);
    Ok(Transfer { transfer, engine: connection.engine, objects: Mutex::new(objects) })
}

fn ranges(places: Vec<Place>) -> Vec<Range> {
    places.into_iter().map(|(address, len, stream)| Range { address, len, stream }).collect()
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
        let objects = self.objects.get_mut().unwrap_or_else(PoisonError::into_inner);
        let objects = std::mem::take(objects);
        left().push((Arc::clone(&self.transfer), objects));
    }
}

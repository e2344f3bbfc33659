//! What `ucx1-sys` calls of bindgen 0.59, by a later bindgen.
//!
//! bindgen 0.59 panics where libclang 16 or newer names a type without a name, as UCX's headers have,
//! and Ubuntu 24.04 and Debian 13 have no older libclang. `[patch.crates-io]` of the workspace puts this
//! crate in its place.
//!
//! *Invariant:* the bindings have the types that bindgen 0.59 gave them.

#[allow(deprecated, reason = "a constant of this name is what `ucx1-sys` uses")]
pub use current::CargoCallbacks;

/// Makes the builder that `ucx1-sys` goes on with.
#[derive(Debug)]
pub struct Builder;

impl Builder {
    /// A builder with the defaults of bindgen 0.59.
    #[expect(clippy::should_implement_trait, reason = "it is called by this name")]
    #[must_use]
    pub fn default() -> current::Builder {
        current::Builder::default().size_t_is_usize(false)
    }
}

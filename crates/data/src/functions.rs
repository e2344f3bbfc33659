//! Tables of functions that are looked up in a library at run time.
//!
//! *Invariant:* the functions of a table are those of one library, which stays open.

/// Declares such a table, and how each function is looked up.
macro_rules! functions {
    (
        $(#[$of_table:meta])* $visible:vis struct $table:ident;
        $($(#[$doc:meta])* fn $name:ident($($argument:ty),* $(,)?) $(-> $result:ty)?;)*
    ) => {
        $(#[$of_table])*
        #[allow(non_snake_case, reason = "the library's own names")]
        $visible struct $table {
            $($(#[$doc])* $visible $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl $table {
            /// Looks every function up.
            ///
            /// # Safety
            /// The functions of `library` must have the types declared here, and it must never be
            /// closed.
            $visible unsafe fn find(
                library: &libloading::Library,
            ) -> Result<Self, (&'static str, libloading::Error)> {
                Ok(Self {
                    $($name: {
                        let name = stringify!($name);
                        // SAFETY: the caller's promise about the library.
                        *unsafe { library.get(name) }.map_err(|error| (name, error))?
                    },)*
                })
            }
        }
    };
}

pub(crate) use functions;

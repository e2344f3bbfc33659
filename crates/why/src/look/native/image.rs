//! What a program or a library says of its own code: how its stacks are unwound, and the names of
//! its functions.
//!
//! *Invariant:* who reads a file has a place in it of its own: many threads read one at a time.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, PoisonError};

use elf_object::read::ReadCache;
use elf_object::{
    Object as _, ObjectSection as _, ObjectSegment as _, ObjectSymbol as _, SymbolKind,
};
use framehop::{ExplicitModuleSectionInfo, Module};

use super::maps::{FileId, Mapping};

/// The longest tables that are read: those of the largest libraries for GPUs have less.
const LONGEST: u64 = 128 << 20;

/// The bytes of a section.
pub(super) type Section = Arc<[u8]>;

/// What was read, for all processes of a job: most have the same libraries.
#[derive(Default)]
pub(in crate::look) struct Images(Mutex<BTreeMap<FileId, Option<Arc<Image>>>>);

impl Images {
    /// Reads a file, unless it was read before; `None` if it is no program or library.
    pub(super) fn of(&self, id: FileId, open: impl FnOnce() -> Option<File>) -> Option<Arc<Image>> {
        let known = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(image) = known().get(&id) {
            return image.clone();
        }
        // Not while all others wait.
        let image = open().and_then(Image::read).map(Arc::new);
        known().entry(id).or_insert(image).clone()
    }
}

/// A program or a library. Its addresses are those that the file states.
pub(super) struct Image {
    file: File,
    /// Where the file's parts are in memory: the place in the file, and the address.
    segments: Vec<(Range<u64>, u64)>,
    tables: BTreeMap<&'static str, (Range<u64>, Section)>,
    /// Names that were looked up.
    names: Mutex<BTreeMap<u64, Named>>,
}

/// How far into a function an address is, and the function's name.
type Named = Option<(u64, String)>;

const EH_FRAME: &str = ".eh_frame";
const EH_FRAME_HDR: &str = ".eh_frame_hdr";

impl Image {
    fn read(file: File) -> Option<Self> {
        let cache = ReadCache::new(Reader::of(&file));
        let object = elf_object::File::parse(&cache).ok()?;
        let segments = object.segments().map(|segment| {
            let (offset, length) = segment.file_range();
            (offset..offset.saturating_add(length), segment.address())
        });
        let segments = segments.collect();
        let table = |name: &'static str| {
            let section = object.section_by_name(name)?;
            let (begin, length) = (section.address(), section.size());
            let data = (length <= LONGEST).then(|| section.uncompressed_data().ok()).flatten()?;
            Some((name, (begin..begin.saturating_add(length), Arc::from(&*data))))
        };
        let tables = [EH_FRAME, EH_FRAME_HDR].into_iter().filter_map(table).collect();
        Some(Self { file, segments, tables, names: Mutex::default() })
    }

    /// The address that the file states for one in memory.
    pub(super) fn stated(&self, mapping: &Mapping, address: u64) -> Option<u64> {
        let offset = address.checked_sub(mapping.range.start)?.checked_add(mapping.offset)?;
        let (range, begin) = self.segments.iter().find(|(range, _)| range.contains(&offset))?;
        begin.checked_add(offset - range.start)
    }

    /// The tables, for unwinding where an address is; `None` if it has none.
    pub(super) fn module(&self, mapping: &Mapping, address: u64) -> Option<Module<Section>> {
        let table = |name| self.tables.get(name).cloned().unzip();
        let (eh_frame_svma, eh_frame) = table(EH_FRAME);
        let (eh_frame_hdr_svma, eh_frame_hdr) = table(EH_FRAME_HDR);
        eh_frame.as_ref()?;
        // Not where the mapping begins: its first page may be another segment's, too.
        let base = address.checked_sub(self.stated(mapping, address)?)?;
        let info = ExplicitModuleSectionInfo {
            eh_frame_svma,
            eh_frame,
            eh_frame_hdr_svma,
            eh_frame_hdr,
            ..Default::default()
        };
        Some(Module::new(mapping.path.clone(), mapping.range.clone(), base, info))
    }

    /// How far into a function a stated address is, and the function's name.
    pub(super) fn symbol(&self, address: u64) -> Named {
        let names = || self.names.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(name) = names().get(&address) {
            return name.clone();
        }
        let name = self.look_up(address);
        names().entry(address).or_insert(name).clone()
    }

    fn look_up(&self, address: u64) -> Named {
        let cache = ReadCache::new(Reader::of(&self.file));
        let object = elf_object::File::parse(&cache).ok()?;
        let of_code = |symbol: &elf_object::Symbol<'_, '_, _>| symbol.kind() == SymbolKind::Text;
        let at = |symbol: &elf_object::Symbol<'_, '_, _>| {
            let begin = symbol.address();
            begin <= address && address < begin.saturating_add(symbol.size().max(1))
        };
        let symbols = object.symbols().chain(object.dynamic_symbols());
        let symbol = symbols.filter(of_code).find(at)?;
        Some((address.checked_sub(symbol.address())?, demangled(symbol.name().ok()?)))
    }
}

/// Reads a file from a place that is nobody else's, as that of a descriptor's copy would be.
struct Reader<'a> {
    file: &'a File,
    place: u64,
}

impl<'a> Reader<'a> {
    fn of(file: &'a File) -> Self {
        Self { file, place: 0 }
    }
}

impl Read for Reader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.place)?;
        self.place += read as u64;
        Ok(read)
    }
}

impl Seek for Reader<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let place = match to {
            SeekFrom::Start(place) => Some(place),
            SeekFrom::Current(away) => self.place.checked_add_signed(away),
            SeekFrom::End(away) => self.file.metadata()?.len().checked_add_signed(away),
        };
        self.place = place.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.place)
    }
}

/// A name as it is in the source, without the types of arguments.
fn demangled(name: &str) -> String {
    if let Ok(rust) = rustc_demangle::try_demangle(name) {
        return format!("{rust:#}");
    }
    let options = cpp_demangle::DemangleOptions::new().no_params().no_return_type();
    let cpp = cpp_demangle::Symbol::new(name).ok();
    cpp.and_then(|symbol| symbol.demangle_with_options(&options).ok())
        .unwrap_or_else(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_in_the_source() {
        assert_eq!(demangled("MPI_Allreduce"), "MPI_Allreduce");
        assert_eq!(demangled("_ZN4gloo9allreduceERNS_16AllreduceOptionsE"), "gloo::allreduce");
        assert_eq!(demangled("_RNvC6_123foo3bar"), "123foo::bar");
    }

    #[test]
    fn names_are_the_same_when_many_look_at_once() {
        let own =
            || Image::read(File::open("/proc/self/exe").expect("it runs")).expect("a program");
        let image = own();
        let own_code =
            |one: &Mapping| one.range.contains(&(demangled as fn(&str) -> String as usize as u64));
        let mappings = super::super::maps::mappings(std::process::id());
        let code = mappings.into_iter().find(own_code).expect("this function is somewhere");
        let places = (1..17).filter_map(|at| image.stated(&code, code.range.start + at * 0x3000));
        let places: Vec<u64> = places.collect();
        let alone: Vec<Named> = places.iter().map(|at| own().look_up(*at)).collect();
        std::thread::scope(|scope| {
            let looks = places.iter().map(|at| scope.spawn(|| image.look_up(*at)));
            let looks: Vec<_> = looks.collect();
            let together = looks.into_iter().map(|look| look.join().expect("no panic"));
            assert_eq!(together.collect::<Vec<_>>(), alone);
        });
        assert!(alone.iter().any(Option::is_some), "some are functions");
    }

    #[test]
    fn what_is_no_program_has_no_image() {
        let manifest = File::open(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
        assert!(Image::read(manifest.expect("it is there")).is_none());
    }
}

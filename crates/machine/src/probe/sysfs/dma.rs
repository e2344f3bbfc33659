//! DMA functions of NICs (ConnectX-8's Data Direct): which NIC has which.
//!
//! Such a function lies beside a GPU, in another PCI domain than its NIC, and only the UUID of the
//! card in the vital product data of both says that they belong together (rdma-core's `rdma_topo`).
//! Of the data most kernels show nothing to others than root.
//!
//! *Invariant:* a NIC has a DMA function only if both name the same card, and no other DMA function
//! names it.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};

use super::pci::PciTree;
use super::vpd;
use cuda_cluster_model::ids::PciAddress;
use cuda_cluster_model::topology::{DmaFunction, Nic, Note};

/// Mellanox' PCI vendor number.
const MELLANOX: u16 = 0x15b3;
/// `ConnectX-8 Data Direct` (the kernel's `mlx5/data_direct.c`).
const DMA_FUNCTION: (u16, u16) = (MELLANOX, 0x2100);
/// ConnectX-7, 8 and 9, whose data name a card (`rdma_topo`).
const NAMES_CARD: [(u16, u16); 3] = [(MELLANOX, 0x1021), (MELLANOX, 0x1023), (MELLANOX, 0x1025)];
/// Those of them that can have a DMA function.
const CAN_HAVE_ONE: [(u16, u16); 2] = [(MELLANOX, 0x1023), (MELLANOX, 0x1025)];

/// What a function's data say.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Told {
    Card(String),
    /// Nothing; whether that is because root alone may read them.
    Nothing {
        roots: bool,
    },
}

/// Gives each NIC its DMA function, if the machine has any.
pub(super) fn give_to(nics: &mut [Nic], tree: &PciTree, notes: &mut Vec<Note>) {
    let functions: BTreeMap<PciAddress, Told> =
        tree.with_id(DMA_FUNCTION).map(|place| (place, told(tree, place))).collect();
    if functions.is_empty() {
        return;
    }
    let mut untold = Untold::default();
    for nic in nics {
        // A virtual function has no data of its own.
        let Some(place) = nic.pci.map(|pci| tree.physical(pci).unwrap_or(pci)) else { continue };
        let Some(id) = tree.id(place).filter(|id| NAMES_CARD.contains(id)) else { continue };
        let own = told(tree, place);
        nic.dma = of(&own, &functions, CAN_HAVE_ONE.contains(&id));
        if nic.dma_is_untold() {
            untold.add(&nic.name, functions.values().chain([&own]));
        }
    }
    notes.extend(untold.note(functions.keys()));
}

fn told(tree: &PciTree, place: PciAddress) -> Told {
    tree.path(place).map_or(Told::Nothing { roots: false }, |path| in_words(vpd::card(path)))
}

fn in_words(card: io::Result<Option<String>>) -> Told {
    match card {
        Ok(Some(card)) => Told::Card(card),
        Ok(None) => Told::Nothing { roots: false },
        Err(error) => Told::Nothing { roots: error.kind() == ErrorKind::PermissionDenied },
    }
}

/// The DMA function of a NIC whose data say this. It has one of unknown place if it can have one
/// and the data do not tell which.
fn of(own: &Told, functions: &BTreeMap<PciAddress, Told>, can_have: bool) -> Option<DmaFunction> {
    let untold = || can_have.then(DmaFunction::default);
    let Told::Card(_) = own else { return untold() };
    let mut same = functions.iter().filter(|(_, told)| *told == own);
    match (same.next(), same.next()) {
        (Some((place, _)), None) => Some(DmaFunction { pci: Some(*place), parent: None }),
        (Some(_), Some(_)) => untold(),
        (None, _) if functions.values().all(|told| matches!(told, Told::Card(_))) => None,
        (None, _) => untold(),
    }
}

/// NICs whose DMA functions are unknown.
#[derive(Default)]
struct Untold {
    names: Vec<String>,
    roots: bool,
}

impl Untold {
    fn add<'a>(&mut self, name: &str, told: impl IntoIterator<Item = &'a Told>) {
        self.names.push(name.to_owned());
        self.roots |= told.into_iter().any(|told| *told == Told::Nothing { roots: true });
    }

    fn note<'a>(self, functions: impl Iterator<Item = &'a PciAddress>) -> Option<Note> {
        let places: Vec<String> = functions.map(ToString::to_string).collect();
        let why = match self.roots {
            true => {
                "which root alone may read: a file of this machine that root writes \
                 ('cuda-cluster topo -o yaml') has it, and plans take that instead"
            }
            false => "which do not tell it",
        };
        let text = format!(
            "which of {} has which of the DMA functions beside GPUs ({}) is in their vital product \
             data, {why}",
            self.names.join(", "),
            places.join(", ")
        );
        (!self.names.is_empty()).then(|| Note::new("nics", text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn place(domain: u32) -> PciAddress {
        PciAddress { domain, bus: 3, device: 0, function: 0 }
    }

    fn card(name: &str) -> Told {
        Told::Card(name.to_owned())
    }

    #[test]
    fn a_nic_has_the_function_of_its_card_if_that_is_certain() {
        let untold = Some(DmaFunction::default());
        let nothing = Told::Nothing { roots: true };
        let two = BTreeMap::from([(place(8), card("b")), (place(9), card("a"))]);
        let at = |domain| Some(DmaFunction { pci: Some(place(domain)), parent: None });
        assert_eq!(of(&card("a"), &two, true), at(9));
        assert_eq!(of(&card("b"), &two, false), at(8));
        assert_eq!(of(&card("c"), &two, true), None, "another NIC");
        assert_eq!(of(&nothing, &two, true), untold);
        assert_eq!(of(&nothing, &two, false), None);
        let half = BTreeMap::from([(place(8), nothing.clone()), (place(9), card("a"))]);
        assert_eq!(of(&card("a"), &half, true), at(9));
        assert_eq!(of(&card("b"), &half, true), untold);
        let same = BTreeMap::from([(place(8), card("a")), (place(9), card("a"))]);
        assert_eq!(of(&card("a"), &same, true), untold, "two of one card");
    }

    #[test]
    fn data_that_are_roots_alone_are_said_to_be() {
        let told = |kind: ErrorKind| in_words(Err(kind.into()));
        let note = |told: Told| {
            let mut untold = Untold::default();
            untold.add("mlx5_0", [&card("a"), &told]);
            untold.add("mlx5_1", [&card("a"), &card("b")]);
            untold.note([place(8), place(9)].iter()).expect("a note").to_string()
        };
        let begins = "nics: which of mlx5_0, mlx5_1 has which of the DMA functions beside GPUs \
                      (0008:03:00.0, 0009:03:00.0) is in their vital product data, which";
        let roots = note(told(ErrorKind::PermissionDenied));
        assert!(roots.starts_with(begins) && roots.contains("root alone may read"), "{roots}");
        let broken = note(told(ErrorKind::NotFound));
        assert!(broken.starts_with(begins) && broken.ends_with("do not tell it"), "{broken}");
        assert_eq!(Untold::default().note([place(8)].iter()), None);
    }

    proptest! {
        #[test]
        fn a_function_is_given_only_to_who_names_its_card(
            functions in proptest::collection::vec(proptest::option::of(0u8..3), 0..5),
            own in proptest::option::of(0u8..3),
            can_have: bool
        ) {
            let told = |card: Option<u8>| {
                card.map_or(Told::Nothing { roots: false }, |card| Told::Card(card.to_string()))
            };
            let all = (0..).zip(&functions).map(|(at, card)| (place(at), told(*card)));
            let all: BTreeMap<PciAddress, Told> = all.collect();
            let own = told(own);
            match of(&own, &all, can_have) {
                Some(DmaFunction { pci: Some(place), .. }) => {
                    prop_assert_eq!(&all[&place], &own);
                    prop_assert_eq!(all.values().filter(|told| **told == own).count(), 1);
                }
                Some(_) => prop_assert!(can_have),
                None => {}
            }
        }
    }
}

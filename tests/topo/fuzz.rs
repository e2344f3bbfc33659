//! The readers on damaged text: seeds with pieces cut out, duplicated, swapped and changed. For
//! long runs guided by coverage there is `scripts/fuzz.sh`; this is the short version.

use std::fs;
use std::path::Path;

use cuda_cluster::topology::parse;
use proptest::prelude::*;

/// The seeds of the fuzz targets.
fn seeds() -> Vec<String> {
    let mut texts = Vec::new();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds");
    for reader in fs::read_dir(folder).expect("the seeds are there") {
        for seed in fs::read_dir(reader.expect("an entry").path()).expect("a folder") {
            texts.push(fs::read_to_string(seed.expect("an entry").path()).expect("text"));
        }
    }
    texts.sort();
    texts
}

/// One change: its position, its length, and its kind.
#[derive(Clone, Debug)]
enum Change {
    Cut,
    Double,
    Insert(String),
    From(prop::sample::Index, prop::sample::Index),
}

fn any_change() -> impl Strategy<Value = Change> {
    let words = [
        "0",
        "-1",
        "4294967296",
        "1e400",
        "\"",
        "'",
        "<",
        ">",
        "&a;",
        "[",
        "]",
        "{",
        "}",
        ": ",
        "- ",
        "\t",
        "\n",
        "\r",
        "\0",
        "N/A",
        "X",
        "NV1",
        "GPU0",
        "NIC0",
        ",",
        "0-65535",
        "0x",
        "*a",
        "&a ",
        "null",
        "é",
        "\u{1b}[4m",
        "#",
        "|",
    ];
    prop_oneof![
        Just(Change::Cut),
        Just(Change::Double),
        prop::sample::select(words.to_vec()).prop_map(|word| Change::Insert(word.to_owned())),
        (any::<prop::sample::Index>(), any::<prop::sample::Index>())
            .prop_map(|(seed, at)| Change::From(seed, at)),
    ]
}

fn changed(
    mut text: Vec<char>,
    seeds: &[String],
    changes: &[(prop::sample::Index, usize, Change)],
) -> String {
    for (place, length, change) in changes {
        let start = place.index(text.len() + 1);
        let end = (start + length).min(text.len());
        let piece: Vec<char> = match change {
            Change::Cut => Vec::new(),
            Change::Double => text[start..end].repeat(2),
            Change::Insert(word) => word.chars().collect(),
            Change::From(seed, at) => {
                let other: Vec<char> = seed.get(seeds).chars().collect();
                let from = at.index(other.len());
                other[from..(from + length).min(other.len())].to_vec()
            }
        };
        text.splice(start..end, piece);
    }
    text.into_iter().collect()
}

#[test]
fn the_seeds_themselves_are_read_but_for_those_that_nest_too_deeply() {
    let refused = seeds().into_iter().filter_map(|seed| Some((parse(&seed).err()?, seed)));
    let mut deep = 0;
    for (error, seed) in refused {
        assert!(error.to_string().contains("it is nested too deeply"), "{error}\n{seed}");
        deep += 1;
    }
    assert_eq!(deep, 5);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn damaged_text_is_read_or_refused_and_what_is_read_can_be_written(
        seed in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), 0usize..24, any_change()), 1..6),
    ) {
        let seeds = seeds();
        let text = changed(seed.get(&seeds).chars().collect(), &seeds, &changes);
        if let Ok(topology) = parse(&text) {
            prop_assert_eq!(parse(&topology.to_yaml()), Ok(topology.clone()), "{}", text);
            let _ = (topology.to_matrix(), topology.to_tree(), topology.to_nccl());
            let _ = (topology.to_dot(), topology.to_svg());
        }
    }
}

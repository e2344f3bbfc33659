//! A source file as the rules see it: its text, and what its code names, unit tests left out.

use std::collections::BTreeMap;

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

/// The crates below `crates`. A rule sees them as rooms of one house: `crate::os` in `machine` is
/// `crate::machine::os`, and so is `cuda_cluster_machine::os` elsewhere.
pub(crate) const CRATES: [&str; 8] =
    ["model", "wire", "data", "machine", "supervise", "native", "cluster", "why"];

/// A source file.
#[derive(Clone)]
pub(crate) struct Source {
    /// Its path below `src`, or below `crates` without the `src` there, with forward slashes.
    pub(crate) path: String,
    pub(crate) text: String,
    /// The paths that its code names, as far as its own imports say what they mean:
    /// `crate::os::process`, `std::fs::read`, `println`.
    pub(crate) names: Vec<String>,
    /// The methods that its code calls.
    pub(crate) methods: Vec<String>,
    /// The modules that it holds in braces or declares.
    pub(crate) modules: Vec<String>,
    /// The types, traits and functions that it defines.
    pub(crate) defined: Vec<String>,
    /// Whether its code has `unsafe` in it, or allows it.
    pub(crate) has_unsafe: bool,
    /// What its imports bring in: the name, and the path it stands for.
    pub(crate) imports: BTreeMap<String, String>,
    /// Modules that it declares for tests alone, in files of their own.
    pub(crate) test_modules: Vec<String>,
}

impl Source {
    pub(crate) fn new(path: &str, text: &str) -> Self {
        let file = syn::parse_file(&as_one_house(path, text));
        let file = file.unwrap_or_else(|error| panic!("{path}: {error}"));
        let module = module_of(path);
        let mut imports = Imports { found: BTreeMap::new(), module: module.clone() };
        imports.visit_file(&file);
        let mut code = Code { module: module.clone(), imports: imports.found, ..Code::default() };
        code.visit_file(&file);
        Self {
            path: path.to_owned(),
            text: text.to_owned(),
            names: code.names,
            methods: code.methods,
            modules: code.modules,
            defined: code.defined,
            has_unsafe: code.has_unsafe,
            imports: code.imports,
            test_modules: code.test_modules,
        }
    }

    /// `crate::native::core` for `native/core.rs`; `crate` for the root of `src`.
    pub(crate) fn module(&self) -> String {
        module_of(&self.path)
    }

    /// The first module on the way to this one, without `crate::`; empty for the crate's root.
    pub(crate) fn top(&self) -> String {
        self.module().split("::").nth(1).unwrap_or_default().to_owned()
    }

    /// Whether the file holds a module with children, or one directly below the root.
    pub(crate) fn is_room(&self) -> bool {
        let depth = self.path.matches('/').count();
        let bottom = usize::from(self.path.starts_with("model/"));
        self.path.ends_with("/mod.rs") || depth <= bottom
    }

    /// How many lines it has without unit tests at its level. rustfmt puts their end at the margin.
    pub(crate) fn length(&self) -> usize {
        let mut lines = self.text.lines().peekable();
        let mut length = 0;
        while let Some(line) = lines.next() {
            let module = |next: &&str| next.contains("mod ") && next.ends_with('{');
            if line == "#[cfg(test)]" && lines.peek().is_some_and(module) {
                lines.by_ref().find(|line| *line == "}");
            } else {
                length += 1;
            }
        }
        length
    }
}

/// A file's text with its paths as the rules see them.
fn as_one_house(path: &str, text: &str) -> String {
    let own = path.split('/').next().filter(|first| CRATES.contains(first));
    let own = own.map_or("crate::".to_owned(), |own| format!("crate::{own}::"));
    let text = text.replace("crate::", &own);
    CRATES.iter().fold(text, |text, other| {
        text.replace(&format!("cuda_cluster_{other}::"), &format!("crate::{other}::"))
    })
}

fn module_of(path: &str) -> String {
    let stem = path.strip_suffix(".rs").unwrap_or(path);
    let stem = stem.strip_suffix("/mod").unwrap_or(stem);
    match stem {
        "lib" | "main" => "crate".to_owned(),
        stem => format!("crate::{}", stem.replace('/', "::")),
    }
}

/// Replaces `self` and `super` at the beginning of a path by the module they stand for.
fn absolute(module: &str, path: &str) -> String {
    let mut parts = path.split("::").peekable();
    let mut base: Vec<&str> = module.split("::").collect();
    match parts.peek() {
        Some(&"self") => drop(parts.next()),
        Some(&"super") => {}
        _ => return path.to_owned(),
    }
    while parts.next_if_eq(&"super").is_some() {
        base.pop();
    }
    base.into_iter().chain(parts).collect::<Vec<_>>().join("::")
}

/// Whether something is compiled for tests alone.
fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    fn means_test(condition: &syn::Meta) -> bool {
        let parsed = syn::punctuated::Punctuated::<syn::Meta, syn::Token![,]>::parse_terminated;
        match condition {
            syn::Meta::Path(path) => path.is_ident("test"),
            syn::Meta::List(list) if list.path.is_ident("all") => {
                list.parse_args_with(parsed).is_ok_and(|all| all.iter().any(means_test))
            }
            _ => false,
        }
    }
    let is_cfg = |attribute: &&syn::Attribute| attribute.path().is_ident("cfg");
    let conditions = attributes.iter().filter(is_cfg);
    conditions.filter_map(|cfg| cfg.parse_args().ok()).any(|condition| means_test(&condition))
}

fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::ForeignMod(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Macro(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// The name and the path of everything that a `use` brings in; a glob's name is `*`.
fn brought_in(tree: &syn::UseTree, before: &[String]) -> Vec<(String, String)> {
    let joined = |last: &str| {
        let parts = before.iter().map(String::as_str).chain((last != "self").then_some(last));
        parts.collect::<Vec<_>>().join("::")
    };
    match tree {
        syn::UseTree::Path(part) => {
            let mut path = before.to_vec();
            path.push(part.ident.to_string());
            brought_in(&part.tree, &path)
        }
        syn::UseTree::Group(group) => {
            group.items.iter().flat_map(|tree| brought_in(tree, before)).collect()
        }
        syn::UseTree::Name(name) => {
            let name = name.ident.to_string();
            let known = if name == "self" { before.last().cloned() } else { None };
            vec![(known.unwrap_or_else(|| name.clone()), joined(&name))]
        }
        syn::UseTree::Rename(name) => {
            vec![(name.rename.to_string(), joined(&name.ident.to_string()))]
        }
        _ => vec![("*".to_owned(), joined("*"))],
    }
}

/// Collects what a file's `use` items bring in, wherever they stand.
struct Imports {
    found: BTreeMap<String, String>,
    module: String,
}

impl<'ast> Visit<'ast> for Imports {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if !is_for_tests(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        for (name, path) in brought_in(&item.tree, &[]) {
            self.found.insert(name, absolute(&self.module, &path));
        }
    }
}

/// Collects what a file's code names, calls and defines.
#[derive(Default)]
struct Code {
    module: String,
    imports: BTreeMap<String, String>,
    names: Vec<String>,
    methods: Vec<String>,
    modules: Vec<String>,
    defined: Vec<String>,
    has_unsafe: bool,
    test_modules: Vec<String>,
}

impl Code {
    fn name(&mut self, parts: &[String]) {
        let Some((first, rest)) = parts.split_first() else { return };
        let path = parts.join("::");
        let known = self.imports.get(first).map(|known| {
            [known.as_str()].into_iter().chain(rest.iter().map(String::as_str)).collect::<Vec<_>>()
        });
        let meant = known.map_or_else(|| absolute(&self.module, &path), |parts| parts.join("::"));
        self.names.push(meant);
    }

    /// What a macro's call names: its tokens are no syntax yet.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut before = String::new();
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    let ident = ident.to_string();
                    self.has_unsafe |= ident == "unsafe";
                    if before != "::" {
                        self.name(&std::mem::take(&mut path));
                    }
                    if before == "." {
                        self.methods.push(ident)
                    } else {
                        path.push(ident)
                    }
                    before.clear();
                }
                TokenTree::Punct(punct) => before.push(punct.as_char()),
                TokenTree::Group(group) => {
                    before.clear();
                    self.tokens(group.stream());
                }
                TokenTree::Literal(_) => before.clear(),
            }
            if !matches!(before.as_str(), "" | ":" | "::") {
                self.name(&std::mem::take(&mut path));
                before = before.chars().last().map(String::from).unwrap_or_default();
            }
        }
        self.name(&path);
    }
}

impl<'ast> Visit<'ast> for Code {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if is_for_tests(attributes(item)) {
            if let syn::Item::Mod(module) = item
                && module.content.is_none()
            {
                self.test_modules.push(format!("{}::{}", self.module, module.ident));
            }
            return;
        }
        let defined = match item {
            syn::Item::Enum(item) => Some(&item.ident),
            syn::Item::Fn(item) => Some(&item.sig.ident),
            syn::Item::Struct(item) => Some(&item.ident),
            syn::Item::Trait(item) => Some(&item.ident),
            syn::Item::Type(item) => Some(&item.ident),
            _ => None,
        };
        self.defined.extend(defined.map(ToString::to_string));
        visit::visit_item(self, item);
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.modules.push(item.ident.to_string());
        let outside = self.module.clone();
        self.module = format!("{outside}::{}", item.ident);
        visit::visit_item_mod(self, item);
        self.module = outside;
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_for_tests(&item.attrs) {
            self.defined.push(item.sig.ident.to_string());
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let found = brought_in(&item.tree, &[]).into_iter();
        self.names.extend(found.map(|(_, path)| absolute(&self.module, &path)));
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let parts: Vec<String> = path.segments.iter().map(|part| part.ident.to_string()).collect();
        self.name(&parts);
        visit::visit_path(self, path);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        self.methods.push(call.method.to_string());
        visit::visit_expr_method_call(self, call);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.tokens(call.tokens.clone());
        visit::visit_macro(self, call);
    }

    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        let lifts = ["allow", "expect"].iter().any(|word| attribute.path().is_ident(word));
        if lifts && let syn::Meta::List(list) = &attribute.meta {
            self.has_unsafe |= list.tokens.to_string().contains("unsafe_code");
        }
        visit::visit_attribute(self, attribute);
    }

    fn visit_expr_unsafe(&mut self, block: &'ast syn::ExprUnsafe) {
        self.has_unsafe = true;
        visit::visit_expr_unsafe(self, block);
    }

    fn visit_safety(&mut self, safety: &'ast syn::Safety) {
        self.has_unsafe |= matches!(safety, syn::Safety::Unsafe(_));
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        self.has_unsafe |= item.unsafety.is_some();
        visit::visit_item_impl(self, item);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.has_unsafe |= item.unsafety.is_some();
        visit::visit_item_trait(self, item);
    }

    fn visit_item_foreign_mod(&mut self, item: &'ast syn::ItemForeignMod) {
        self.has_unsafe = true;
        visit::visit_item_foreign_mod(self, item);
    }
}

//! `plugins`, `check`, `inspect`, `pack`, `diff` and `grant`: plugin files as text, judged and never run.
//!
//! What must stay true: the judgement is the loader's own (`warp-manifest`), so that what is good here loads, and
//! a file that a host would refuse is refused here with the same words.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use warp_domain::policy::Declared;
use warp_domain::units::format_size;
use warp_manifest::{HostWorld, Loaded, Manifest, Refusal, Warning, check, check_grant, check_imports, load, warnings_across};

use crate::args::{CheckArgs, DiffArgs, GrantArgs, InspectArgs, PackArgs};
use crate::commands::jobs::concurrency_text;
use crate::config::{Config, retry_text, timeout_text};
use crate::failure::{Exit, Failure, Outcome};
use crate::{files, grants, hosting, json, text};

/// What a host of this version offers to guests.
pub fn world() -> HostWorld {
    HostWorld::of(warp_plugin_host::OFFERED)
}

// ------------------------------------------------------------------------------------------------- plugins

/// One file of the directory of plugins.
struct Candidate {
    path: PathBuf,
    loaded: Option<Loaded>,
    refusals: Vec<Refusal>,
}

/// `plugins`.
///
/// # Errors
/// A directory that cannot be read.
pub fn plugins(config: &Config) -> Outcome {
    let dir = &config.plugins.value;
    let mut candidates: Vec<_> = files_with(dir, "wasm")?.into_iter().map(|path| candidate(path, config)).collect();
    // Two plugins for one contract: the later one is refused, in the order in which a host reads them.
    let served: Vec<usize> = candidates.iter().enumerate().filter(|(_, c)| c.refusals.is_empty()).map(|(at, _)| at).collect();
    let manifests: Vec<&Manifest> = served.iter().filter_map(|at| candidates[*at].loaded.as_ref()).map(|loaded| &loaded.manifest).collect();
    let across = warnings_across(&manifests);
    for (at, refusal) in across.refusals {
        if let Some(at) = served.get(at) {
            candidates[*at].refusals.push(refusal);
        }
    }
    if config.json {
        return text::print_json(&candidates.iter().map(plugin_row).collect::<Vec<_>>());
    }
    if candidates.is_empty() {
        text::note(format!("no .wasm file in {} (from {})", dir.display(), config.plugins.origin));
        return Ok(());
    }
    let row = |candidate: &Candidate| {
        let json::Plugin { file, name, version, digest, contracts, state, .. } = plugin_row(candidate);
        let digest = digest.map_or_else(String::new, |digest| digest.trim_start_matches("sha256:").chars().take(12).collect());
        let contracts: Vec<_> = contracts.into_iter().map(|contract| contract.contract).collect();
        [file, state.to_owned(), name.unwrap_or_default(), version.unwrap_or_default(), digest, contracts.join(", ")]
    };
    text::print(text::table(["FILE", "STATE", "NAME", "VERSION", "DIGEST", "CONTRACTS"], candidates.iter().map(row)))?;
    for candidate in &candidates {
        let policies = candidate.loaded.as_ref().map(|loaded| policy_lines(&loaded.manifest)).unwrap_or_default();
        if !policies.is_empty() {
            text::print(format!("\n{}", text::line(&candidate.path.display().to_string())))?;
            policies.iter().try_for_each(|line| text::print(format!("  {}", text::line(line))))?;
        }
    }
    let warnings = candidates.iter().filter_map(|candidate| candidate.loaded.as_ref()).flat_map(|loaded| &loaded.warnings);
    let warnings: Vec<_> = warnings.chain(&across.warnings).map(ToString::to_string).collect();
    let refusals = candidates.iter().flat_map(|candidate| &candidate.refusals).map(ToString::to_string);
    for said in refusals.chain(warnings) {
        text::print(format!("\n{}", text::harmless(said.trim_end(), true)))?;
    }
    Ok(())
}

fn candidate(path: PathBuf, config: &Config) -> Candidate {
    // `check` says what it refuses; only what it finds good is read again for its grant.
    let report = check(&path, &world());
    if !report.is_good() {
        return Candidate { path, loaded: None, refusals: report.refusals };
    }
    match loaded(&path) {
        Ok(loaded) => {
            let grant = config.grants.get(&loaded.manifest.plugin.name).map(|(grant, _)| grant);
            let refusals = match check_grant(&loaded.manifest, grant) {
                Ok(granted) => hosting::grants(config).check_directories(&loaded.manifest.file, &granted),
                Err(refusal) => vec![*refusal],
            };
            Candidate { path, loaded: Some(loaded), refusals }
        }
        Err(refusals) => Candidate { path, loaded: None, refusals },
    }
}

fn plugin_row(candidate: &Candidate) -> json::Plugin {
    let Candidate { path, loaded, refusals } = candidate;
    let manifest = loaded.as_ref().map(|loaded| &loaded.manifest);
    json::Plugin {
        file: path.display().to_string(),
        name: manifest.map(|manifest| manifest.plugin.name.clone()),
        version: manifest.map(|manifest| manifest.plugin.version.clone()),
        digest: loaded.as_ref().map(|loaded| loaded.digest.to_string()),
        contracts: loaded.as_ref().map(contract_rows).unwrap_or_default(),
        state: if refusals.is_empty() { "would load" } else { "refused" },
        refusals: refusals.iter().map(ToString::to_string).collect(),
        warnings: loaded.iter().flat_map(|loaded| &loaded.warnings).map(ToString::to_string).collect(),
    }
}

fn contract_rows(loaded: &Loaded) -> Vec<json::PluginContract> {
    let row = |declarations: warp_domain::resolve::Declarations| {
        let stamp = warp_domain::resolve::resolve(&Declared::default(), &declarations);
        json::PluginContract { contract: declarations.contract, handler: declarations.handler, policy: (&stamp).into() }
    };
    loaded.manifest.declarations(loaded.digest).into_iter().map(row).collect()
}

/// What jobs of each contract follow, one line per family that is declared.
fn policy_lines(manifest: &Manifest) -> Vec<String> {
    let mut lines = Vec::new();
    for (kind, name, declared) in manifest
        .contracts
        .iter()
        .map(|(name, contract)| ("contract", name, &contract.declared))
        .chain(manifest.handlers.iter().map(|(name, handler)| ("handler", name, &handler.declared)))
    {
        let Declared { concurrency, retry, timeout } = declared;
        lines.extend(concurrency.iter().map(|value| format!("{kind} {name}: {}", concurrency_text(value))));
        lines.extend(retry.iter().map(|value| format!("{kind} {name}: retry {}", retry_text(value))));
        lines.extend(timeout.iter().map(|value| format!("{kind} {name}: timeout {}", timeout_text(value))));
    }
    lines
}

/// Files of a directory with an extension, by name; hidden ones (such as those half written) are left out.
fn files_with(dir: &Path, extension: &str) -> Outcome<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).map_err(|error| match error.kind() {
        ErrorKind::NotFound => Failure::not_found(format!("there is no directory {}; name another with --plugins", dir.display())),
        _ => Failure::from(error).context(format!("failed to read the directory {}", dir.display())),
    })?;
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
        if !hidden && path.extension().is_some_and(|found| found == extension) && path.is_file() {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// A component and its manifest, judged as far as the file goes.
fn loaded(path: &Path) -> Result<Loaded, Vec<Refusal>> {
    let unreadable = |path: &Path, error: &std::io::Error| {
        let location = warp_manifest::Location { file: path.display().to_string(), at: None, key: String::new() };
        let (kind, remedy) = (warp_manifest::RefusalKind::Io, "check the path and its rights".to_owned());
        vec![Refusal { kind, location, problem: format!("failed to read it: {error}"), remedy }]
    };
    let bytes = fs::read(path).map_err(|error| unreadable(path, &error))?;
    let beside = path.with_extension("toml");
    let sidecar = match fs::read_to_string(&beside) {
        Ok(text) => Some(text),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(unreadable(&beside, &error)),
    };
    load(&path.with_extension("").display().to_string(), &bytes, sidecar.as_deref())
}

fn refused(refusals: &[Refusal]) -> Failure {
    Failure::usage(refusals.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
}

/// The manifest of a `.toml` or of a packed component.
///
/// # Errors
/// No such file (3), or a manifest that would be refused (2).
pub fn manifest_of(path: &Path) -> Outcome<Manifest> {
    let missing = |error: std::io::Error| match error.kind() {
        ErrorKind::NotFound => Failure::not_found(format!("there is no file {}", path.display())),
        _ => Failure::usage(format!("failed to read {}: {error}", path.display())),
    };
    fs::metadata(path).map_err(missing)?;
    if path.extension().is_some_and(|extension| extension == "toml") {
        let text = fs::read_to_string(path).map_err(missing)?;
        return Manifest::parse(&text, &path.display().to_string()).map_err(|refusals| refused(&refusals));
    }
    loaded(path).map(|loaded| loaded.manifest).map_err(|refusals| refused(&refusals))
}

// ------------------------------------------------------------------------------------------------- check, inspect

/// `check`.
///
/// # Errors
/// Anything that a host would refuse (2).
pub fn check_files(args: &CheckArgs, as_json: bool) -> Outcome {
    let world = world();
    let reports: Vec<_> = args.files.iter().map(|file| check(file, &world)).collect();
    // What several files say against each other, as a host that loads all of them would find.
    let good: Vec<_> =
        reports.iter().filter(|report| report.is_good()).filter_map(|report| report.manifest.as_ref().map(|m| (&report.file, m))).collect();
    // A manifest and the file that it is packed into are one plugin, not two.
    let is_text = |file: &str| file.ends_with(".toml");
    let is_packed = |name: &str| good.iter().any(|(file, manifest)| !is_text(file) && manifest.plugin.name == name);
    let apart: Vec<&Manifest> = good
        .iter()
        .filter(|(file, manifest)| !(is_text(file) && is_packed(&manifest.plugin.name)))
        .map(|(_, manifest)| *manifest)
        .collect();
    let across = warnings_across(&apart);
    let all_good = reports.iter().all(warp_manifest::Report::is_good) && across.refusals.is_empty();
    if as_json {
        let rows = reports.iter().map(|report| json::Checked {
            file: report.file.clone(),
            good: report.is_good(),
            refusals: report.refusals.iter().map(finding_of).collect(),
            warnings: report.warnings.iter().map(warning_of).collect(),
        });
        let together = json::CheckedTogether {
            refusals: across.refusals.iter().map(|(_, refusal)| finding_of(refusal)).collect(),
            warnings: across.warnings.iter().map(warning_of).collect(),
        };
        text::print_json(&json::CheckReport { good: all_good, files: rows.collect(), together })?;
    } else {
        for report in &reports {
            text::print(text::harmless(&report.to_string(), true))?;
        }
        for said in across.refusals.iter().map(|(_, refusal)| refusal.to_string()).chain(across.warnings.iter().map(ToString::to_string)) {
            text::print(text::harmless(&said, true))?;
        }
    }
    if all_good { Ok(()) } else { Err(Failure::silent(Exit::Usage)) }
}

fn finding_of(refusal: &Refusal) -> json::Finding {
    finding(&refusal.location, &refusal.problem, &refusal.remedy)
}

fn warning_of(warning: &Warning) -> json::Finding {
    finding(&warning.location, &warning.problem, &warning.remedy)
}

fn finding(location: &warp_manifest::Location, problem: &str, remedy: &str) -> json::Finding {
    json::Finding {
        file: location.file.clone(),
        line: location.at.map(|at| at.line),
        column: location.at.map(|at| at.column),
        key: Some(location.key.clone()).filter(|key| !key.is_empty()),
        problem: problem.to_owned(),
        remedy: remedy.to_owned(),
    }
}

/// `inspect`.
///
/// # Errors
/// A file that is no component, or carries no good manifest (2).
pub fn inspect(args: &InspectArgs, as_json: bool) -> Outcome {
    let path = &args.file;
    let bytes = fs::metadata(path)
        .map_err(|error| match error.kind() {
            ErrorKind::NotFound => Failure::not_found(format!("there is no file {}", path.display())),
            _ => Failure::usage(format!("failed to read {}: {error}", path.display())),
        })?
        .len();
    let loaded = loaded(path).map_err(|refusals| refused(&refusals))?;
    let problems = check_imports(&path.display().to_string(), &loaded.surface, &loaded.manifest, &world());
    let row = json::Inspected {
        file: path.display().to_string(),
        bytes,
        digest: loaded.digest.to_string(),
        name: loaded.manifest.plugin.name.clone(),
        version: loaded.manifest.plugin.version.clone(),
        contracts: contract_rows(&loaded),
        capabilities: capabilities(&loaded.manifest),
        imports: loaded.surface.imports.iter().map(ToString::to_string).collect(),
        exports: loaded.surface.functions.clone(),
        refusals: problems.iter().map(finding_of).collect(),
        warnings: loaded.warnings.iter().map(warning_of).collect(),
    };
    if as_json {
        return text::print_json(&row);
    }
    let mut facts = vec![
        ("file", row.file),
        ("size", format!("{bytes} bytes")),
        ("digest", row.digest),
        ("plugin", format!("{} {}", row.name, row.version)),
    ];
    facts.extend(loaded.manifest.handled().map(|(contract, handler)| ("runs", format!("{contract} with handler {handler}"))));
    facts.extend(policy_lines(&loaded.manifest).into_iter().map(|line| ("policy", line)));
    let json::Capabilities { files, env, state, memory } = row.capabilities;
    facts.extend(files.into_iter().map(|file| ("asks for", format!("directory {} to {}", file.path, file.mode))));
    facts.extend(env.into_iter().map(|name| ("asks for", format!("variable {name}"))));
    facts.extend(state.into_iter().map(|b| ("asks for", format!("bucket {} (commit {}, write {})", b.bucket, b.commit, b.write))));
    facts.extend(memory.map(|size| ("asks for", format!("{size} of memory"))));
    facts.extend(row.imports.into_iter().map(|name| ("imports", name)));
    facts.extend(row.exports.into_iter().map(|name| ("exports", name)));
    facts.extend(problems.iter().map(|refusal| ("refused", refusal.to_string())));
    facts.extend(loaded.warnings.iter().map(|warning| ("warning", warning.to_string())));
    for (name, value) in facts {
        text::print(format!("{name:<9} {}", text::line(&value)))?;
    }
    Ok(())
}

fn capabilities(manifest: &Manifest) -> json::Capabilities {
    let asked = &manifest.capabilities;
    json::Capabilities {
        files: asked.files.iter().map(|file| json::AskedFile { path: file.path.clone(), mode: file.mode.name() }).collect(),
        env: asked.env.clone(),
        state: asked
            .state
            .iter()
            .map(|bucket| json::AskedBucket { bucket: bucket.bucket.clone(), commit: bucket.commit.name(), write: bucket.write.name() })
            .collect(),
        memory: asked.memory.map(format_size),
    }
}

// ------------------------------------------------------------------------------------------------- pack, diff

/// `pack`.
///
/// # Errors
/// A manifest or component that would be refused (2), or a file that is in the way (4).
pub fn pack(args: &PackArgs, as_json: bool) -> Outcome {
    let read = |path: &Path| {
        fs::read(path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => Failure::not_found(format!("there is no file {}", path.display())),
            _ => Failure::usage(format!("failed to read {}: {error}", path.display())),
        })
    };
    let component = read(&args.component)?;
    let text = String::from_utf8(read(&args.manifest)?)
        .map_err(|error| Failure::usage(format!("{}: not UTF-8: {error}", args.manifest.display())))?;
    let manifest = Manifest::parse(&text, &args.manifest.display().to_string()).map_err(|refusals| refused(&refusals))?;
    let of_component = |error: warp_manifest::ComponentError| Failure::usage(format!("{}: {error}", args.component.display()));
    let packed = match warp_manifest::read(&component).map_err(of_component)? {
        // Packing is the last step of a build, and a build that changes nothing runs it again.
        Some(there) if there == text => component,
        _ => warp_manifest::pack(&component, &text).map_err(of_component)?,
    };
    let surface = warp_manifest::surface(&packed).map_err(of_component)?;
    let problems = check_imports(&args.component.display().to_string(), &surface, &manifest, &world());
    if !problems.is_empty() {
        return Err(refused(&problems));
    }
    let out = match (&args.out, args.in_place) {
        (Some(out), _) => out.clone(),
        (None, true) => args.component.clone(),
        (None, false) => args.manifest.with_file_name(format!("{}.wasm", manifest.plugin.name)),
    };
    if out.exists() && !args.in_place && !args.force && fs::read(&out).ok().as_ref() != Some(&packed) {
        return Err(Failure::new(Exit::Refused, format!("{} exists already; name another with -o, or add --force", out.display())));
    }
    if let Some(parent) = args.out.as_ref().and_then(|out| out.parent()) {
        fs::create_dir_all(parent).map_err(|error| Failure::from(error).context(format!("failed to create {}", parent.display())))?;
    }
    files::write_whole(&out, &packed).map_err(|error| Failure::from(error).context(format!("failed to write {}", out.display())))?;
    let stem = out.with_extension("").display().to_string();
    let loaded = load(&stem, &packed, None).map_err(|refusals| refused(&refusals))?;
    for warning in &loaded.warnings {
        text::note(text::line(&warning.to_string()));
    }
    if as_json {
        let (plugin, digest) = (loaded.manifest.plugin, loaded.digest.to_string());
        let file = out.display().to_string();
        return text::print_json(&json::Packed { file, name: plugin.name, version: plugin.version, digest, bytes: packed.len() as u64 });
    }
    text::print(format!("packed {} {} into {}, {}", manifest.plugin.name, manifest.plugin.version, out.display(), loaded.digest))
}

/// `diff`.
///
/// # Errors
/// A file without a good manifest (2).
pub fn diff(args: &DiffArgs, as_json: bool) -> Outcome {
    let changes = warp_manifest::diff(&manifest_of(&args.old)?, &manifest_of(&args.new)?);
    if as_json {
        let row = |change: &warp_manifest::Change| json::PolicyChange {
            path: change.path.clone(),
            what: change.what.clone(),
            in_flight: change.in_flight.clone(),
        };
        return text::print_json(&changes.iter().map(row).collect::<Vec<_>>());
    }
    if changes.is_empty() {
        return text::print("nothing that jobs would notice");
    }
    for change in &changes {
        text::print(format!("{}: {}\n    {}", text::line(&change.path), text::line(&change.what), text::line(&change.in_flight)))?;
    }
    Ok(())
}

// ------------------------------------------------------------------------------------------------- grant

/// `grant`.
///
/// # Errors
/// No such plugin (3), a `warp.toml` that cannot be read or written.
pub fn grant(args: &GrantArgs, config: &Config) -> Outcome {
    let path = &config.file;
    if config.file_is_manifest {
        return Err(Failure::new(
            Exit::Refused,
            format!("{} is a plugin's manifest; name the host's own with --config, or run this where the host runs", path.display()),
        ));
    }
    let manifest = find_plugin(&args.name, &config.plugins.value)?;
    let dirs: BTreeMap<String, String> = args.dir.iter().cloned().collect();
    let before = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
        Err(error) => return Err(Failure::usage(format!("failed to read {}: {error}", path.display()))),
    };
    let added = grants::add(&before, &manifest, &dirs).map_err(|why| Failure::usage(format!("{}: {why}", path.display())))?;
    if !args.dry_run && !added.changes.is_empty() {
        files::write_whole(path, added.text.as_bytes())
            .map_err(|error| Failure::from(error).context(format!("failed to write {}", path.display())))?;
    }
    if config.json {
        return text::print_json(&json::GrantWritten {
            plugin: manifest.plugin.name.clone(),
            file: path.display().to_string(),
            dry_run: args.dry_run,
            changes: added.changes,
            table: added.table,
        });
    }
    if added.changes.is_empty() {
        return text::print(format!("`{}` has everything that it asks for; {} is unchanged", manifest.plugin.name, path.display()));
    }
    text::print(text::harmless(added.table.trim_end(), true))?;
    text::note(format!("{} in {}:", if args.dry_run { "would be granted" } else { "granted" }, path.display()));
    for change in &added.changes {
        text::note(format!("  {}", text::line(change)));
    }
    for missing in missing_directories(&added.text, &manifest, config) {
        text::note(format!("{} does not exist yet; the plugin is refused until it does", text::line(&missing.display().to_string())));
    }
    if !args.dry_run {
        text::note("a running host reads it when it starts; restart it");
    }
    Ok(())
}

/// Directories that a text of settings grants to a plugin and that are not there.
fn missing_directories(settings: &str, manifest: &Manifest, config: &Config) -> Vec<PathBuf> {
    let plugins = grants::read(settings).unwrap_or_default();
    // What is not granted is another command's to say.
    let Ok(granted) = check_grant(manifest, plugins.get(&manifest.plugin.name)) else { return Vec::new() };
    let grants = warp_plugin_host::Grants { base: hosting::beside_settings(config), ..warp_plugin_host::Grants::default() };
    granted.files.iter().map(|file| grants.directory(&file.host)).filter(|path| !path.exists()).collect()
}

/// The manifest of a plugin by its name, among the files of the directory; a path to one is taken as such.
fn find_plugin(name: &str, dir: &Path) -> Outcome<Manifest> {
    if name.ends_with(".wasm") || name.ends_with(".toml") {
        return manifest_of(Path::new(name));
    }
    let mut known = Vec::new();
    for path in files_with(dir, "wasm")? {
        match loaded(&path) {
            Ok(loaded) if loaded.manifest.plugin.name == name => return Ok(loaded.manifest),
            Ok(loaded) => known.push(loaded.manifest.plugin.name),
            // A file of that name which is refused is what was meant, and why it is refused is the answer.
            Err(refusals) if path.file_stem().is_some_and(|stem| stem == name) => return Err(refused(&refusals)),
            Err(_) => {}
        }
    }
    let known = if known.is_empty() { "no plugin at all".to_owned() } else { known.join(", ") };
    Err(Failure::not_found(format!("there is no plugin `{name}` in {}, which has {known}", dir.display())))
}

//! Checkpoints of a tenant's runs: states in directories, and adapters in the registry, which are named after
//! their run.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use control_protocol::training::session::{CommandRefusal, Lora};
use serde::{Deserialize, Serialize};

use super::{
    checkpoint_path,
    expiry::{self, expires_at, is_over},
};
use crate::adapters::{AdapterEntry, table::AdapterNames};

/// Maximum number of states per tenant.
const MAX_STATES: usize = 1024;
/// File with the base and adapter size of a state.
const ABOUT: &str = "about.json";
/// Temporary name of that file while it is written.
const PARTIAL_ABOUT: &str = "about.json.partial";

/// Base and adapter size of a state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct CheckpointBase {
    /// Name of the base.
    pub base: String,
    /// Size of the adapter.
    pub lora: Option<Lora>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointKind {
    /// Adapter and optimizer state, to resume training.
    State,
    /// An adapter that is served.
    Sampler,
    /// An adapter for download.
    External,
}

impl CheckpointKind {
    /// Segment of the kind in checkpoint paths.
    #[must_use]
    pub(crate) fn segment(self) -> &'static str {
        match self {
            Self::State => "weights",
            Self::Sampler => "sampler_weights",
            Self::External => "external_weights",
        }
    }

    /// Name of the kind in lists.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::State => "training",
            Self::Sampler => "sampler",
            Self::External => "external",
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    /// Run that the checkpoint belongs to.
    pub run: String,
    pub name: String,
    pub kind: CheckpointKind,
    /// Size on disk in bytes.
    pub bytes: u64,
    /// Creation time in seconds since 1970.
    pub at: u64,
    /// Rank of the adapter, if known.
    pub rank: Option<usize>,
    /// Expiry time in seconds since 1970, if any.
    pub expires_at: Option<u64>,
}

impl Checkpoint {
    /// Returns the path by which clients name the checkpoint.
    #[must_use]
    pub fn path(&self) -> String {
        format!("tinker://{}/{}", self.run, self.id())
    }

    /// Returns the part of the path after the run.
    #[must_use]
    pub fn id(&self) -> String {
        format!("{}/{}", self.kind.segment(), self.name)
    }
}

/// Iterates over the adapters of `tenant` that are checkpoints with names.
pub(crate) fn adapters<'a>(
    table: &'a AdapterNames,
    tenant: &'a str,
) -> impl Iterator<Item = Checkpoint> + 'a {
    let of_tenant = |entry: &&AdapterEntry| entry.record.tenant.as_deref() == Some(tenant);
    table.values().map(|entry| &**entry).filter(of_tenant).filter_map(|entry| {
        let name = &entry.record.name;
        let sampler = checkpoint_path::sampler_of(name).map(|named| (CheckpointKind::Sampler, named));
        let (kind, (run, name)) =
            sampler.or_else(|| Some((CheckpointKind::External, checkpoint_path::export_of(name)?)))?;
        Some(Checkpoint {
            run: run.to_owned(),
            name: name.to_owned(),
            kind,
            bytes: entry.record.bytes,
            at: entry.record.loaded_at,
            rank: Some(entry.record.rank as usize),
            expires_at: entry.expires_at(),
        })
    })
}

#[derive(Debug, Clone)]
pub struct CheckpointStore {
    root: PathBuf,
    /// Maximum bytes of one tenant's states.
    tenant_bytes: u64,
}

impl CheckpointStore {
    /// Opens the store below `state`, the gateway's state directory. A tenant with `tenant_bytes` of states
    /// can add none.
    #[must_use]
    pub fn below(state: &Path, tenant_bytes: u64) -> Self {
        Self { root: state.join("tinker"), tenant_bytes }
    }

    /// Maximum bytes of a tenant's states, and again of its suspended models.
    #[must_use]
    pub fn tenant_bytes(&self) -> u64 {
        self.tenant_bytes
    }

    /// Returns the directory of a state. Names of one tenant never lead to another tenant's directory.
    #[must_use]
    pub fn directory(&self, tenant: &str, run: &str, name: &str) -> PathBuf {
        self.of(tenant).join(run).join(name)
    }

    /// Checks that a state may be stored under this name, and creates its parent directory. Returns the
    /// state's directory. The size of the state is not known yet, so the last state may exceed the limit.
    ///
    /// # Errors
    /// If the limit is reached, or a state of this name exists and `overwrite` is false.
    pub(crate) fn make_room(
        &self,
        tenant: &str,
        run: &str,
        name: &str,
        overwrite: bool,
    ) -> Result<PathBuf, CommandRefusal> {
        let directory = self.directory(tenant, run, name);
        if self.has(tenant, run, name) && !overwrite {
            let message =
                format!("there is a state '{name}' already; choose another name, or set overwrite=True");
            return Err(CommandRefusal::user(message));
        }
        let failed = |error: io::Error| CommandRefusal::server(format!("cannot save the state: {error}"));
        fs::create_dir_all(self.of(tenant).join(run)).map_err(failed)?;
        let mut others = self.list(tenant).map_err(failed)?;
        others.retain(|state| (state.run.as_str(), state.name.as_str()) != (run, name));
        let (count, bytes) = (others.len(), others.iter().map(|state| state.bytes).sum::<u64>());
        let limit = self.tenant_bytes;
        if count < MAX_STATES && bytes < limit {
            if directory.exists() {
                // A sweep must not remove the state that is about to be written.
                expiry::set(&directory, None).map_err(failed)?;
            }
            return Ok(directory);
        }
        Err(CommandRefusal::user(format!(
            "you have {count} states of {bytes} bytes; the limits are {MAX_STATES} states and {limit} \
             bytes (--tenant-state-bytes); delete some with RestClient.delete_checkpoint"
        )))
    }

    fn of(&self, tenant: &str) -> PathBuf {
        // A tenant's name may be any text, so its hash names the directory.
        self.root.join("states").join(&blake3::hash(tenant.as_bytes()).to_hex()[..32])
    }

    /// Whether a state of this name exists and has not expired.
    #[must_use]
    pub fn has(&self, tenant: &str, run: &str, name: &str) -> bool {
        let directory = self.directory(tenant, run, name);
        directory.exists() && !is_over(expires_at(&directory))
    }

    /// Removes the expired states of all tenants.
    ///
    /// # Errors
    /// If states cannot be listed or removed.
    pub fn sweep(&self) -> io::Result<()> {
        for tenant in entries(&self.root.join("states"))? {
            for run in entries(&tenant)? {
                let mut states = entries(&run)?;
                states.retain(|state| is_over(expires_at(state)));
                for state in &states {
                    tracing::info!(state = %state.display(), "removed a state of a Tinker run whose \
                        ttl_seconds have passed");
                    fs::remove_dir_all(state)?;
                }
                if !states.is_empty() {
                    // The directory of the run is removed with its last state.
                    let _ = fs::remove_dir(&run);
                }
            }
        }
        Ok(())
    }

    /// Lists the states of `tenant`.
    ///
    /// # Errors
    /// If the directories cannot be read.
    pub fn list(&self, tenant: &str) -> io::Result<Vec<Checkpoint>> {
        let mut all = Vec::new();
        for run in entries(&self.of(tenant))? {
            for state in entries(&run)? {
                // A state that is being removed or was never finished is skipped.
                all.extend(state_at(&state).ok().filter(|state| !is_over(state.expires_at)));
            }
        }
        Ok(all)
    }

    /// Writes base and adapter size of a state. When this returns, the file and all parent directories are
    /// synced.
    ///
    /// # Errors
    /// If the file cannot be written; an earlier file stays then.
    pub(crate) fn describe(&self, directory: &Path, about: &CheckpointBase) -> io::Result<()> {
        let (beside, bytes) = (directory.join(PARTIAL_ABOUT), serde_json::to_vec(about)?);
        let mut file = File::create(&beside)?;
        file.write_all(&bytes).and_then(|()| file.sync_all())?;
        fs::rename(&beside, directory.join(ABOUT))?;
        let way = directory.ancestors().take_while(|place| place.starts_with(&self.root));
        way.chain(self.root.parent()).try_for_each(|place| File::open(place)?.sync_all())
    }

    /// Returns base and adapter size of a state, if they were written.
    #[must_use]
    pub(crate) fn about(directory: &Path) -> Option<CheckpointBase> {
        serde_json::from_slice(&fs::read(directory.join(ABOUT)).ok()?).ok()
    }

    /// Removes a state; false if there is none.
    ///
    /// # Errors
    /// If the state cannot be removed.
    pub fn remove(&self, tenant: &str, run: &str, name: &str) -> io::Result<bool> {
        let directory = self.directory(tenant, run, name);
        match fs::remove_dir_all(&directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            removed => removed?,
        }
        // The directory of the run is removed with its last state.
        let _ = directory.parent().map(fs::remove_dir);
        Ok(true)
    }
}

/// Lists the paths in a directory; none if the directory does not exist.
fn entries(directory: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        found => found?.map(|entry| Ok(entry?.path())).collect(),
    }
}

fn state_at(directory: &Path) -> io::Result<Checkpoint> {
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (mut bytes, mut at) = (0, None);
    for file in fs::read_dir(directory)? {
        let found = file?.metadata()?;
        bytes += found.len();
        at = at.max(Some(found.modified()?));
    }
    let since_1970 = |at: SystemTime| at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    Ok(Checkpoint {
        run: directory.parent().map(name).unwrap_or_default(),
        name: name(directory),
        kind: CheckpointKind::State,
        bytes,
        at: at.map(since_1970).ok_or(io::ErrorKind::NotFound)?,
        rank: CheckpointStore::about(directory).and_then(|about| about.lora).map(|lora| lora.rank),
        expires_at: expires_at(directory),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::seconds_since_1970;

    #[test]
    fn states_are_listed_with_what_they_take_and_taken_away() {
        let place = tempfile::tempdir().unwrap();
        let states = CheckpointStore::below(place.path(), 1 << 20);
        assert_eq!(states.list("alice").unwrap(), []);
        let directory = states.directory("alice", "r-0", "first");
        fs::create_dir_all(&directory).unwrap();
        assert_eq!(states.list("alice").unwrap(), [], "nothing is in it yet");
        fs::write(directory.join("checkpoint"), [0; 100]).unwrap();
        let lora = Lora { rank: 8, alpha: 32.0, targets: Vec::new() };
        fs::write(directory.join(PARTIAL_ABOUT), "{\"base\":").unwrap();
        assert_eq!(CheckpointStore::about(&directory), None, "a description that was cut off is none");
        states.describe(&directory, &CheckpointBase { base: "base".to_owned(), lora: Some(lora) }).unwrap();
        assert!(!directory.join(PARTIAL_ABOUT).exists());
        let listed = states.list("alice").unwrap();
        assert_eq!((listed.len(), listed[0].rank), (1, Some(8)));
        assert_eq!(listed[0].path(), "tinker://r-0/weights/first");
        assert!(listed[0].bytes > 100 && listed[0].at > 0);
        assert_eq!(states.list("bob").unwrap(), []);
        assert!(!states.remove("bob", "r-0", "first").unwrap());
        assert!(states.remove("alice", "r-0", "first").unwrap());
        assert!(!states.remove("alice", "r-0", "first").unwrap());
        assert_eq!(states.list("alice").unwrap(), []);
    }

    #[test]
    fn a_state_ends_with_its_time_and_leaves_room() {
        let place = tempfile::tempdir().unwrap();
        let states = CheckpointStore::below(place.path(), 100);
        let directories = ["over", "later", "never"].map(|name| {
            let directory = states.directory("alice", "r-0", name);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("checkpoint"), [0; 60]).unwrap();
            directory
        });
        let later = seconds_since_1970() + 3600;
        expiry::set(&directories[1], Some(later)).unwrap();
        assert!(states.make_room("alice", "r-0", "another", false).is_err());
        for at in [None, Some(1)] {
            expiry::set(&directories[0], at).unwrap();
        }
        let mut listed = states.list("alice").unwrap();
        listed.sort_by(|a, b| a.name.cmp(&b.name));
        let ends: Vec<_> = listed.iter().map(|state| (state.name.as_str(), state.expires_at)).collect();
        assert_eq!(ends, [("later", Some(later)), ("never", None)]);
        let has = |name| states.has("alice", "r-0", name);
        assert!(!has("over") && has("later") && has("never"));
        states.sweep().unwrap();
        assert_eq!(directories.map(|directory| directory.exists()), [false, true, true]);
        let alone = states.directory("bob", "r-1", "only");
        fs::create_dir_all(&alone).unwrap();
        expiry::set(&alone, Some(1)).unwrap();
        states.sweep().unwrap();
        assert!(!alone.parent().unwrap().exists(), "a run without states is gone");
    }

    #[test]
    fn what_a_tenant_keeps_is_bounded_and_a_state_may_be_replaced() {
        let place = tempfile::tempdir().unwrap();
        let states = CheckpointStore::below(place.path(), 100);
        let directory = states.make_room("alice", "r-0", "first", false).unwrap();
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("checkpoint"), [0; 100]).unwrap();
        let refused = states.make_room("alice", "r-0", "second", false).unwrap_err();
        assert!(refused.message.contains("--tenant-state-bytes") && refused.message.contains("100 bytes"));
        let taken = states.make_room("alice", "r-0", "first", false).unwrap_err();
        assert!(taken.message.contains("overwrite=True"), "{}", taken.message);
        assert_eq!(states.make_room("alice", "r-0", "first", true).unwrap(), directory);
        states.make_room("bob", "r-0", "second", false).unwrap();
    }

    #[test]
    fn tenants_share_no_directory() {
        let states = CheckpointStore::below(Path::new("state"), 1);
        let of = |tenant| states.directory(tenant, "r-0", "last");
        assert_ne!(of("alice"), of("bob"));
        assert!(of("../../etc").starts_with("state/tinker/states"));
    }
}

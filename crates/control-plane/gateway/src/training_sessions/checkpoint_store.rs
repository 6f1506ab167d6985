//! What is kept of a tenant's runs: states in directories, and adapters in the registry that are called after their run.

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

/// Most states that a tenant keeps.
const MAX_STATES: usize = 1024;
/// What a state is of, beside what the trainer wrote.
const ABOUT: &str = "about.json";
/// The same while it is written.
const PARTIAL_ABOUT: &str = "about.json.partial";

/// What a state is of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CheckpointBase {
    /// The model that was trained.
    pub base: String,
    /// The size of its adapter.
    pub lora: Option<Lora>,
}

/// What can be gone on from, or sampled from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointKind {
    /// Adapter and optimizer.
    State,
    /// An adapter that is served.
    Sampler,
    /// An adapter for download.
    External,
}

impl CheckpointKind {
    /// As paths have it.
    #[must_use]
    pub fn segment(self) -> &'static str {
        match self {
            Self::State => "weights",
            Self::Sampler => "sampler_weights",
            Self::External => "external_weights",
        }
    }

    /// As lists have it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::State => "training",
            Self::Sampler => "sampler",
            Self::External => "external",
        }
    }
}

/// Something that is kept of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    /// Of which run.
    pub run: String,
    /// Its name.
    pub name: String,
    /// What can be done with it.
    pub kind: CheckpointKind,
    /// What it takes.
    pub bytes: u64,
    /// When it was kept, in seconds since 1970.
    pub at: u64,
    /// Rank of the adapter, if that is known.
    pub rank: Option<usize>,
    /// When it ends, in seconds since 1970, if it does.
    pub expires_at: Option<u64>,
}

impl Checkpoint {
    /// Where clients find it.
    #[must_use]
    pub fn path(&self) -> String {
        format!("tinker://{}/{}", self.run, self.id())
    }

    /// The same within its run.
    #[must_use]
    pub fn id(&self) -> String {
        format!("{}/{}", self.kind.segment(), self.name)
    }
}

/// Adapters of `tenant` that are kept of runs under names.
pub fn adapters<'a>(table: &'a AdapterNames, tenant: &'a str) -> impl Iterator<Item = Checkpoint> + 'a {
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

/// Where states are.
#[derive(Debug, Clone)]
pub struct CheckpointStore {
    root: PathBuf,
    /// What those of a tenant may take.
    tenant_bytes: u64,
}

impl CheckpointStore {
    /// Below `state`, the gateway's directory; no more is kept for a tenant whose states take `tenant_bytes`.
    #[must_use]
    pub fn below(state: &Path, tenant_bytes: u64) -> Self {
        Self { root: state.join("tinker"), tenant_bytes }
    }

    /// What states of a tenant may take, and again its suspended models.
    #[must_use]
    pub fn tenant_bytes(&self) -> u64 {
        self.tenant_bytes
    }

    /// Where the state of this name is, or is to be. What one tenant names never leads to another's.
    #[must_use]
    pub fn directory(&self, tenant: &str, run: &str, name: &str) -> PathBuf {
        self.of(tenant).join(run).join(name)
    }

    /// Checks that a state may be kept under this name, makes room for its directory, and says where that is. How much the
    /// state will take is not known yet: the last one may go beyond the limit.
    ///
    /// # Errors
    /// There is no room, or a state of this name that is not to be overwritten.
    pub fn make_room(
        &self,
        tenant: &str,
        run: &str,
        name: &str,
        overwrite: bool,
    ) -> Result<PathBuf, CommandRefusal> {
        let directory = self.directory(tenant, run, name);
        if self.has(tenant, run, name) && !overwrite {
            let message =
                format!("there is a state '{name}' already: choose another name, or say overwrite=True");
            return Err(CommandRefusal::user(message));
        }
        let failed = |error: io::Error| CommandRefusal::server(format!("the state cannot be kept: {error}"));
        fs::create_dir_all(self.of(tenant).join(run)).map_err(failed)?;
        let mut others = self.list(tenant).map_err(failed)?;
        others.retain(|state| (state.run.as_str(), state.name.as_str()) != (run, name));
        let (count, bytes) = (others.len(), others.iter().map(|state| state.bytes).sum::<u64>());
        let limit = self.tenant_bytes;
        if count < MAX_STATES && bytes < limit {
            if directory.exists() {
                // A sweep must not remove what is about to be written.
                expiry::set(&directory, None).map_err(failed)?;
            }
            return Ok(directory);
        }
        Err(CommandRefusal::user(format!(
            "you keep {count} states of {bytes} bytes, and may keep {MAX_STATES} of {limit} (--tenant-state-bytes): \
             take some away with RestClient.delete_checkpoint"
        )))
    }

    fn of(&self, tenant: &str) -> PathBuf {
        // A tenant's name may be anything; a directory's may not.
        self.root.join("states").join(&blake3::hash(tenant.as_bytes()).to_hex()[..32])
    }

    /// Whether there is a state of this name whose time is not over.
    #[must_use]
    pub fn has(&self, tenant: &str, run: &str, name: &str) -> bool {
        let directory = self.directory(tenant, run, name);
        directory.exists() && !is_over(expires_at(&directory))
    }

    /// Removes states of all tenants whose time is over.
    ///
    /// # Errors
    /// They cannot be looked at, or one cannot be removed.
    pub fn sweep(&self) -> io::Result<()> {
        for tenant in entries(&self.root.join("states"))? {
            for run in entries(&tenant)? {
                let mut states = entries(&run)?;
                states.retain(|state| is_over(expires_at(state)));
                for state in &states {
                    tracing::info!(state = %state.display(), "a state of a Tinker run is removed: its ttl_seconds are over");
                    fs::remove_dir_all(state)?;
                }
                if !states.is_empty() {
                    // The last one takes its run along.
                    let _ = fs::remove_dir(&run);
                }
            }
        }
        Ok(())
    }

    /// Every state of `tenant`.
    ///
    /// # Errors
    /// They cannot be looked at.
    pub fn list(&self, tenant: &str) -> io::Result<Vec<Checkpoint>> {
        let mut all = Vec::new();
        for run in entries(&self.of(tenant))? {
            for state in entries(&run)? {
                // One that is being removed, or was never finished, is none.
                all.extend(state_at(&state).ok().filter(|state| !is_over(state.expires_at)));
            }
        }
        Ok(all)
    }

    /// Writes down what a state is of. When this returns, that is on the disk, and so is the way to the state's directory.
    ///
    /// # Errors
    /// It cannot be written; what was written before stands.
    pub fn describe(&self, directory: &Path, about: &CheckpointBase) -> io::Result<()> {
        let (beside, bytes) = (directory.join(PARTIAL_ABOUT), serde_json::to_vec(about)?);
        let mut file = File::create(&beside)?;
        file.write_all(&bytes).and_then(|()| file.sync_all())?;
        fs::rename(&beside, directory.join(ABOUT))?;
        let way = directory.ancestors().take_while(|place| place.starts_with(&self.root));
        way.chain(self.root.parent()).try_for_each(|place| File::open(place)?.sync_all())
    }

    /// What a state is of, if that was written down.
    #[must_use]
    pub fn about(directory: &Path) -> Option<CheckpointBase> {
        serde_json::from_slice(&fs::read(directory.join(ABOUT)).ok()?).ok()
    }

    /// Takes a state away; false if there is none.
    ///
    /// # Errors
    /// It cannot be taken away.
    pub fn remove(&self, tenant: &str, run: &str, name: &str) -> io::Result<bool> {
        let directory = self.directory(tenant, run, name);
        match fs::remove_dir_all(&directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            removed => removed?,
        }
        // The last one takes its run along.
        let _ = directory.parent().map(fs::remove_dir);
        Ok(true)
    }
}

/// Paths in a directory; none if it is not there.
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

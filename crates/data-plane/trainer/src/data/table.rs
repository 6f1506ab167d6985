//! Tables of Parquet and Arrow files, whose rows become lines of JSON.

use std::{
    fs::File,
    io::{self, BufReader, Read, Seek as _},
    panic::{AssertUnwindSafe, catch_unwind},
};

use arrow_array::RecordBatch;
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_json::LineDelimitedWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

/// Number of rows that are lines at a time.
const ROWS: usize = 64;

/// First bytes of Arrow's file format; the library `datasets` writes the stream format, which has none.
const ARROW_FILE: &[u8] = b"ARROW1";

/// Runs `read`. The libraries of tables panic at some damaged files, which is an error like any other.
fn unharmed<T>(read: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let damaged = |_| io::Error::new(io::ErrorKind::InvalidData, "the table is damaged");
    catch_unwind(AssertUnwindSafe(read)).map_err(damaged)?
}

/// Returns the rows of a Parquet file as lines.
pub(super) fn parquet(file: File) -> io::Result<Box<dyn Read>> {
    unharmed(|| parquet_lines(file))
}

/// Returns the rows of an Arrow file as lines.
pub(super) fn arrow(file: File) -> io::Result<Box<dyn Read>> {
    unharmed(|| arrow_lines(file))
}

fn parquet_lines(file: File) -> io::Result<Box<dyn Read>> {
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).map_err(io::Error::other)?;
    let batches = reader.with_batch_size(ROWS).build().map_err(io::Error::other)?;
    Ok(Box::new(TableLines::new(batches.map(|batch| batch.map_err(io::Error::other)))))
}

fn arrow_lines(mut file: File) -> io::Result<Box<dyn Read>> {
    let mut begin = [0; ARROW_FILE.len()];
    let is_file = file.read_exact(&mut begin).is_ok() && begin == ARROW_FILE;
    file.rewind()?;
    let file = BufReader::new(file);
    Ok(if is_file {
        let batches = FileReader::try_new(file, None).map_err(io::Error::other)?;
        Box::new(TableLines::new(batches.map(|batch| batch.map_err(io::Error::other))))
    } else {
        let batches = StreamReader::try_new(file, None).map_err(io::Error::other)?;
        Box::new(TableLines::new(batches.map(|batch| batch.map_err(io::Error::other))))
    })
}

/// Rows as lines, of which a part is in memory.
struct TableLines<B> {
    batches: B,
    /// Rows that are not lines yet.
    rows: Option<RecordBatch>,
    lines: Vec<u8>,
    read: usize,
}

impl<B: Iterator<Item = io::Result<RecordBatch>>> TableLines<B> {
    fn new(batches: B) -> Self {
        Self { batches, rows: None, lines: Vec::new(), read: 0 }
    }

    /// Turns the next rows into lines. Returns false at the end of the table.
    fn advance(&mut self) -> io::Result<bool> {
        self.lines.clear();
        self.read = 0;
        let Some(rows) = self.rows.take().map_or_else(|| self.batches.next(), |rows| Some(Ok(rows))) else {
            return Ok(false);
        };
        let rows = rows?;
        let taken = rows.num_rows().min(ROWS);
        if taken < rows.num_rows() {
            self.rows = Some(rows.slice(taken, rows.num_rows() - taken));
        }
        let mut writer = LineDelimitedWriter::new(&mut self.lines);
        writer.write(&rows.slice(0, taken)).map_err(io::Error::other)?;
        writer.finish().map_err(io::Error::other)?;
        Ok(true)
    }
}

impl<B: Iterator<Item = io::Result<RecordBatch>>> Read for TableLines<B> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.read == self.lines.len() {
            if !unharmed(|| self.advance())? {
                return Ok(0);
            }
        }
        let rest = &self.lines[self.read..];
        let taken = rest.len().min(into.len());
        into[..taken].copy_from_slice(&rest[..taken]);
        self.read += taken;
        Ok(taken)
    }
}

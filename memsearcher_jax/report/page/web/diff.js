// A word-level diff of two memories by longest common subsequence, with the runs of report/word_diff.py.

// The words of a text, each with the white space before it; trailing white space belongs to the last word.
function words(text) {
  return text.match(/\s*\S+(?:\s+$)?|^\s+$/g) ?? [];
}

// [["same" | "removed" | "added", text]] in reading order. White space alone is not a change.
function wordDiff(before, after) {
  const old = words(before), now = words(after);
  const oldWords = old.map(word => word.trim()), nowWords = now.map(word => word.trim());
  let start = 0, oldEnd = old.length, nowEnd = now.length;
  while (start < oldEnd && start < nowEnd && oldWords[start] === nowWords[start]) start++;
  while (oldEnd > start && nowEnd > start && oldWords[oldEnd - 1] === nowWords[nowEnd - 1]) { oldEnd--; nowEnd--; }

  // length[i * width + j] is that of the longest common subsequence of the words from start + i and start + j on.
  const rows = oldEnd - start, columns = nowEnd - start, width = columns + 1;
  const length = new Uint32Array((rows + 1) * width);
  for (let i = rows - 1; i >= 0; i--) {
    for (let j = columns - 1; j >= 0; j--) {
      length[i * width + j] = oldWords[start + i] === nowWords[start + j]
        ? length[(i + 1) * width + j + 1] + 1
        : Math.max(length[(i + 1) * width + j], length[i * width + j + 1]);
    }
  }

  const runs = [];
  const add = (change, text) => {
    if (runs.length && runs.at(-1)[0] === change) runs.at(-1)[1] += text;
    else runs.push([change, text]);
  };
  for (let k = 0; k < start; k++) add("same", now[k]);
  let i = 0, j = 0;
  while (i < rows || j < columns) {
    if (i < rows && j < columns && oldWords[start + i] === nowWords[start + j]) {
      add("same", now[start + j]);
      i++; j++;
    } else if (j === columns || (i < rows && length[(i + 1) * width + j] >= length[i * width + j + 1])) {
      add("removed", old[start + i++]);
    } else {
      add("added", now[start + j++]);
    }
  }
  for (let k = nowEnd; k < now.length; k++) add("same", now[k]);
  return runs;
}
